//! What of the zoo is made for a GPU, on a real one: built with `--features gpu`, run by `cargo xtask gpu-test`.
#![allow(clippy::unwrap_used)]

mod gpu {
    mod doctor;
    mod on_device;
    mod programs;
    /// The same jobs as on a processor, of which only some are made here.
    #[allow(dead_code)]
    #[path = "../it/running.rs"]
    mod running;
}
