//! Something to look at: what a run writes of itself, and what is made of it. Needs no libtorch.
//!
//! ```text
//!   rank 0 ─▶ events: OUT_DIR/metrics.jsonl ─┬▶ plot: curves as SVG or PNG
//!        │                                   ├▶ Follow: a reader of the file while it grows
//!        │                                   └▶ page: `drumline watch`, on loopback ◀─┐
//!        ├─▶ tensorboard: event files for TensorBoard                                 │
//!        └─▶ bar: a bar on a terminal, lines elsewhere                                │
//!   each rank ─┬▶ status: OUT_DIR/ranks/00000.json, twice a second ───────────────────┘
//!              └▶ trace: OUT_DIR/trace/rank-00000.json, for Perfetto
//!   slow_ranks: which rank is slower than the others, decided purely
//!   runs: which jobs of this user are running, and in which folders
//!   tail: lines of a file that grows, for all who read one
//!   recent: a figure of the last steps, each weighted by its samples
//!   fake: a run that is none, for tests and trials
//! ```
#![forbid(unsafe_code)]

/// The guide's examples compile, too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/observing.md")]
    mod observing {}
}

pub mod bar;
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
