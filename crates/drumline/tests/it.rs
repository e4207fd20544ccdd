//! Loading and predicting; programs that spawn their ranks and are asked to stop, as real processes.
#![allow(clippy::unwrap_used)]

mod it {
    mod loading;
    mod predicting;
//! Checkpoints under fire, and programs that spawn their ranks and are asked to stop, as real processes.
#![allow(clippy::unwrap_used)]

mod it {
    mod checkpoint;
    mod program;
    mod spawn_life;
    mod spawning;
    mod stopping;
}
