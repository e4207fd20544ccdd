//! The examples as a student runs them.
#![allow(clippy::unwrap_used)]

mod it {
    mod accelerated;
    mod collectives;
    mod deepspeed;
    mod dist_trainer;
    mod dp_vs_ddp;
    mod fastnlp;
    mod launch_try;
    mod pipeline;
    mod same_result;
    mod slurm;
    mod spawn;
    mod started;
    mod tensor_parallel;
    mod three_d;
    mod training;
    mod zero;
}
