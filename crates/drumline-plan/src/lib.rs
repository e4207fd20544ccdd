//! Decisions about a parallel training run as pure data: no libtorch, no sockets, no clocks.
//!
//! ```text
//!   Stage (ZeRO 0–3) ─▶ Placements: what is replicated, what is sharded ─┬─▶ StateBytes: memory of a rank
//!   parameters ─▶ UnitLayout: where each element lies, who owns it ──────┴─▶ StepTraffic: calls and bytes of a step
//! ```
//! - [`Stage`], [`Placements`], [`Placement`]: which states are divided among ranks
//! - [`UnitLayout`]: the flat memory of parameters that are gathered and freed together, and each rank's part of it
//! - [`StateBytes`], [`StepTraffic`]: what a plan costs
//! - [`pipeline`]: what each rank of a pipeline does, the proof that it can, and how long it takes
//! - [`OffloadPlan`]: which units' state is on the device, in host memory or on disk
//!
//! Not here: carrying a plan out (`drumline-parallel`).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod memory;
mod offload;
pub mod pipeline;
mod placement;
mod traffic;
mod unit;

/// Runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub use memory::{StateBytes, StateSizes};
pub use offload::{NoRoom, OffloadPlan, Room, Tier};
pub use placement::{NoSuchStage, Placement, Placements, Stage};
pub use traffic::{Collective, StepTraffic};
pub use unit::{Parameter, Piece, Segment, UnitLayout};
