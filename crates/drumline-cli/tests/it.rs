//! The `drumline` command as a user runs it.
#![allow(clippy::unwrap_used)]

mod it {
    mod every_op;
    mod failing;
    mod joining;
    mod run_args;
    mod started;
    mod torch_environment;
    mod torch_gloo;
    mod torch_nodes;
}
