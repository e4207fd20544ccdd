//! Tests of the zoo on a real GPU: built with `--features gpu`, run by `cargo xtask gpu-test`.
#![allow(clippy::unwrap_used)]

mod gpu {
    mod doctor;
    mod on_device;
    mod programs;
    /// The same jobs as in the CPU tests, of which only some are used here.
    #[allow(dead_code)]
    #[path = "../it/running.rs"]
    mod running;
}
