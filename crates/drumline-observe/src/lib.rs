//! Observing runs: what a run writes about itself, and what is made of it. Needs no libtorch.
//!
//! ```text
//!   rank 0 ─▶ events: OUT_DIR/metrics.jsonl ─┬▶ plot: curves as SVG or PNG
//!        │                                   ├▶ Follow: a reader of the file while it grows
//!        │                                   └▶ page: `drumline watch`, on loopback ◀─┐
//!        ├─▶ tensorboard: event files for TensorBoard; csv: a file for each figure    │
//!        └─▶ bar: a bar on a terminal, lines elsewhere                                │
//!   each rank ─┬▶ status: OUT_DIR/ranks/00000.json, twice a second ───────────────────┘
//!              └▶ trace: OUT_DIR/trace/rank-00000.json, for Perfetto
//!   slow_ranks: which rank is slower than the others, a pure function
//!   runs: which jobs of this user are running, and in which folders
//!   tail: lines of a file that grows
//!   recent: the mean of the last steps, each weighted by its samples
//!   fake: a fake run, for tests and experiments
//! ```
#![forbid(unsafe_code)]

/// The examples of the guide are tested, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/observing.md")]
    mod observing {}
}

pub mod bar;
pub mod csv;
pub mod events;
pub mod fake;
pub mod page;
pub mod plot;
mod recent;
pub mod runs;
pub mod slow_ranks;
pub mod status;
mod tail;
pub mod tensorboard;
pub mod trace;

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
