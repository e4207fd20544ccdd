//! DeepSpeed's engine: a training loop of your own, driven by a `ds_config.json`.
//!
//! ```text
//!   ds_config.json ─▶ config::deepspeed ─▶ plan ─▶ initialize ─▶ DeepSpeedEngine
//!   optimizer, loader, arguments: they fill "auto" ──▲             forward, backward, step, save_checkpoint, …
//! ```
//! ```
//! use drumline::deepspeed;
//! use drumline::tch::nn::{self, VarStore};
//! use drumline::tch::{Device, Reduction, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root(), 1, 1, Default::default());
//! let config = r#"{
//!     "train_micro_batch_size_per_gpu": 4,
//!     "gradient_accumulation_steps": 2,
//!     "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
//!     "zero_optimization": {"stage": 2}, // a comment
//! }"#;
//! let mut engine = deepspeed::initialize(model, &store, config)?;
//! let x = Tensor::from_slice(&[-1f32, 0.0, 1.0, 2.0]).view([4, 1]);
//! for _ in 0..100 {
//!     let loss = engine.forward(&x)?.mse_loss(&(&x * 2.0), Reduction::Mean);
//!     engine.backward(&loss)?;
//!     engine.step()?;
//! }
//! assert_eq!((engine.global_steps(), engine.train_batch_size()), (50, 8));
//! # Ok(())
//! # }
//! ```
//! The engine is an [`Accelerator`](crate::Accelerator) with the settings of the file: windows of micro-batches, loss
//! scaling, clipping, ZeRO and checkpoints are the same code. Not here: reading the file
//! ([`config::deepspeed`](crate::config::deepspeed)), checkpoints that DeepSpeed wrote
//! ([`checkpoint::deepspeed`](crate::checkpoint::deepspeed)).

mod builder;
mod checkpoint;
mod clock;
mod engine;
mod optimizer;
mod source;

use tch::nn::VarStore;

use crate::run_error::RunError;

pub use builder::DeepSpeedBuilder;
pub use checkpoint::LoadedCheckpoint;
pub use engine::DeepSpeedEngine;
pub use source::ConfigSource;

type Result<T = ()> = std::result::Result<T, RunError>;

/// Prepares a model whose variables are in `store` for a training by this configuration: the path of a file, its text,
/// or a [`DeepSpeedConfig`](crate::config::deepspeed::DeepSpeedConfig). All ranks call it, and get the weights of
/// rank 0.
///
/// The optimizer and the schedule are those of the configuration; [`builder`] takes others, a loader, and the arguments
/// that fill `"auto"`.
#[track_caller]
pub fn initialize<M: 'static>(
    model: M,
    store: &VarStore,
    config: impl Into<ConfigSource>,
) -> Result<DeepSpeedEngine<M>> {
    builder(config).initialize(model, store)
}

/// [`initialize`] with options.
pub fn builder(config: impl Into<ConfigSource>) -> DeepSpeedBuilder {
    DeepSpeedBuilder::new(config.into())
}
