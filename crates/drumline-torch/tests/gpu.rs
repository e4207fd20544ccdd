//! The CUDA plugin on a real GPU: built with `--features gpu`, run by `cargo xtask gpu-test`.
#![allow(clippy::unwrap_used)]

mod gpu {
    mod batch_norm;
    mod convolutions;
    mod graphs;
    mod master_weights;
    mod memory;
    mod optimizers;
    mod shared;
    mod streams;
    mod transformers;
}
