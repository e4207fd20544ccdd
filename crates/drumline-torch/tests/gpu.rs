//! The CUDA plugin on a real GPU: built with `--features gpu`, run by `cargo xtask gpu-test`.
#![allow(clippy::unwrap_used)]

mod gpu {
    mod adagrad;
    mod batch_norm;
    mod checkpoints;
    mod convolutions;
    mod dropout;
    mod graphs;
    mod master_weights;
    mod memory;
    mod optimizers;
    mod shared;
    mod streams;
    mod transformers;
}
