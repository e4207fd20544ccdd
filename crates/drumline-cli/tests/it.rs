//! The `drumline` command as a user runs it.
#![allow(clippy::unwrap_used)]

mod it {
    mod every_op;
    mod failing;
    mod job;
    mod joining;
    mod nodes;
    mod restarts;
    mod run_args;
    mod signals;
    mod started;
    mod torch_environment;
    mod torch_gloo;
    mod torch_nodes;
}
