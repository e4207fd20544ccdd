//! What of the zoo is made for a GPU, on a real one: built with `--features gpu`, run by `cargo xtask gpu-test`.
#![allow(clippy::unwrap_used)]

mod gpu {
    mod on_device;
}
