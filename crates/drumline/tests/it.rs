//! Loading and predicting, checkpoints under fire, programs that spawn their ranks and are asked to stop: as real
//! processes.
#![allow(clippy::unwrap_used)]

mod it {
    mod accelerator;
    mod checkpoint;
    mod deepspeed;
    mod loading;
    mod predicting;
    mod program;
    mod spawn_life;
    mod spawning;
    mod step_trace;
    mod stopping;
    mod together;
    mod trainer;
}
