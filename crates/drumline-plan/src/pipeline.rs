//! Pipelines as data: what each rank of a pipeline does, in which order.
//!
//! ```text
//!   Schedule ─▶ Program: a list of actions per rank ─▶ verify ─▶ simulate   (here, without libtorch)
//!   CSV file ─▶                                              └─▶ interpreter (drumline-parallel)
//! ```
//! A model is cut into *stages*, each a run of consecutive layers. A rank holds one stage or several; a batch is cut into
//! *micro-batches*, which travel through the stages one behind the other.
//!
//! - [`Action`]: one thing that a rank does: `2F0`, the forward of stage 2 for micro-batch 0
//! - [`Program`]: the actions of all ranks; [`StageMap`]: which rank holds which stage
//!
//! Not here: tensors, processes, clocks.

mod action;
mod csv;
mod grid;
mod idle;
mod lower;
mod memory;
mod program;
mod schedule;
mod search;
mod simulate;
mod stage_map;
mod tensors;
mod verify;

pub use action::{Action, Compute, Message, NoSuchAction, Way, Work};
pub use csv::{CsvError, CsvForm};
pub use grid::{Grid, Slot};
pub use idle::{Idle, IdleCause};
pub use lower::{LowerError, lower};
pub use memory::{RankPeak, StageBytes};
pub use program::{Place, Program, Unplaced};
pub use schedule::{NoSuchSchedule, PipelineSize, Schedule, ScheduleError};
pub use search::{DoesNotFit, Found, Search};
pub use simulate::{Span, StageTimes, Timeline, Times};
pub use stage_map::StageMap;
pub use tensors::{Tensor, TensorKind};
pub use verify::{Deadlock, MessageRule, Missing, Verified, VerifyError, Wait, progress, verify};
