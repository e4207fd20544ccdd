//! Models, weights and datasets compared with torchvision and PIL; the programs.
#![allow(clippy::unwrap_used)]

mod it {
    mod bert;
    mod checkpointing;
    mod deepspeed;
    mod doctor;
    mod failing_runs;
    mod faults;
    mod golden;
    mod gpt;
    mod gpt_meshes;
    mod gpt_on_mesh;
    mod gpt_runs;
    mod mesh_runs;
    mod mlm_runs;
    mod nmt;
    mod parity;
    mod pipeline_runs;
    mod precision;
    mod programs;
    mod python_weights;
    mod resnet;
    mod running;
    mod text_nets;
    mod texts;
    mod vocab_parts;
    mod zero_runs;
}
