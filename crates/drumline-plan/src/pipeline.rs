//! Pipelines as data: what each rank of a pipeline does, in which order, for how long.
//!
//! ```text
//!   Schedule ─┐                                            ┌▶ simulate ─▶ Timeline ─▶ Idle by cause, Grid
//!   CSV file ─┼─▶ Program: a list of actions ─▶ verify ─▶ ─┼▶ peaks: memory of each rank            (here, without libtorch)
//!   Search ───┘   per rank                                 └▶ interpreter                           (drumline-parallel)
//! ```
//! A model is cut into *stages*, each a run of consecutive layers. A rank holds one stage or several; a batch is cut into
//! *micro-batches*, which travel through the stages one behind the other.
//!
//! - [`partition`]: which layers each stage has
//! - [`Action`]: one thing that a rank does: `2F0`, the forward of stage 2 for micro-batch 0
//! - [`Program`]: the actions of all ranks; [`StageMap`]: which rank holds which stage
//! - [`Schedule`]: programs by name; [`lower`]: the messages of a program; [`Program::from_csv`]: those of PyTorch
//! - [`verify`]: the proof that a program can be carried out; [`progress`]: that nobody waits forever
//! - [`Verified::simulate`]: when everything happens; [`Verified::peaks`]: the memory of each rank
//! - [`Search`]: a program for measured times and little memory
//!
//! ```
//! use drumline_plan::pipeline::{PipelineSize, Schedule, StageTimes, Times, verify};
//!
//! let size = PipelineSize { ranks: 4, chunks: 1, micro_batches: 8 };
//! let program = Schedule::GPipe.program(size)?;
//! let unit = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
//! let timeline = verify(&program)?.simulate(&Times::equal(unit, &program.stages, 0.0));
//! assert_eq!(timeline.makespan, 33.0);
//! assert_eq!(format!("{:.1} %", 100.0 * timeline.idle_share()), "27.3 %");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! Not here: tensors, processes, clocks.

mod action;
mod csv;
mod grid;
mod idle;
mod lower;
mod memory;
mod partition;
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
pub use partition::{PartitionError, partition};
pub use program::{Place, Program, Unplaced};
pub use schedule::{NoSuchSchedule, PipelineSize, Schedule, ScheduleError};
pub use search::{DoesNotFit, Found, Search};
pub use simulate::{Span, StageTimes, Timeline, Times};
pub use stage_map::StageMap;
pub use tensors::{Tensor, TensorKind};
pub use verify::{Deadlock, MessageRule, Missing, Verified, VerifyError, Wait, progress, verify};
