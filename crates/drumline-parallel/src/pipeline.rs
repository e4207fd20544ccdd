//! Pipelines: a model that is cut by its layers, each rank with some stages, and micro-batches that travel through them.
//!
//! ```text
//!   LayerList ─ partition ─▶ the layers of this rank's stages ─┐
//!   Schedule ─▶ Program ─ verify ─▶ this rank's row ───────────┴▶ interpreter ─▶ Executor: libtorch, sleeping, virtual clock
//!                                                                     ▲ links: a thread for each peer and direction
//! ```
//! - [`LayerList`], [`LayerSpec`], [`Layer`]: a model as a list of named layers, of which a rank builds its own
//! - [`Stages`]: what a rank has of a cut model; [`PipelineOptions`]: how it is cut and scheduled
//! - [`Pipeline`]: steps and evaluations of its stages
//! - [`run_row`], [`Executor`]: one loop that carries a row out, whatever an action does
//! - [`Sleeper`], [`VirtualClock`]: executors that sleep instead of computing, and that only count time
//! - [`Linear`], [`Conv2d`], [`Embedding`]: layers whose weight gradients can be computed apart
//!
//! What ranks of one stage do with its gradients is up to the engine within ([`Ddp`](crate::Ddp),
//! [`ShardOptions`](crate::ShardOptions)). Not here: schedules, their proof and their times (`drumline-plan`).

mod build;
mod cut;
mod engine;
mod error;
mod interpreter;
mod layer;
mod layers;
mod link;
mod options;
mod parcel;
mod plan;
mod sleeping;
mod stages;
mod ties;
mod torch;
mod virtual_clock;

pub use drumline_plan::pipeline::{PipelineSize, Program, Schedule};

pub use build::{FirstValues, LayerBuilder};
pub use engine::Pipeline;
pub use error::PipelineError;
pub use interpreter::{Executor, Halted, run_row};
pub use layer::{Boundary, Layer, LayerError, LayerList, LayerSpec, Mode, layer_fn};
pub use layers::{Conv2d, Embedding, Linear};
pub use link::Links;
pub use options::{MicroBatch, PipelineOptions, Scale, StepLoss};
pub use plan::{Order, Plan};
pub use sleeping::Sleeper;
pub use stages::Stages;
pub use torch::LossOf;
pub use virtual_clock::VirtualClock;
