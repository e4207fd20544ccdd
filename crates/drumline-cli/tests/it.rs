//! The `drumline` command as a user runs it.
#![allow(clippy::unwrap_used)]

mod it {
    mod every_op;
    mod failing;
    mod fleet;
    mod fleet_job;
    mod joining;
    mod run_args;
    mod started;
}
