//! Trainings on a GPU, one of which is enough: `cargo test -p drumline --features gpu --test gpu`.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod gpu {
    mod checkpointing;
    mod edges;
    mod fp16;
    mod graphs;
    mod several;
    mod trained;
    mod uploads;
}
