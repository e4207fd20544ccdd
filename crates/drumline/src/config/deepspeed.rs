//! `ds_config.json`, the configuration file of DeepSpeed, read unchanged.
//!
//! ```text
//!   file, text or base64 ─▶ json::parse ─▶ read: each key beside the table of keys ─▶ DeepSpeedConfig
//!   arguments, loader, optimizer: Given ─────────────────────▶ resolve ─▶ DeepSpeedPlan, what each "auto" became
//!                                                              explain ─▶ what each line does here
//! ```
//!
//! - [`KEYS`]: every key of DeepSpeed with its type, its default and what Drumline does with it
//! - [`DeepSpeedConfig`]: what a file contains
//! - [`Given`]: what the program was given, from which `"auto"` is filled
//! - [`DeepSpeedPlan`]: sizes, precision, optimizer, schedule and stage, as plain values
//!
//! Mistakes are collected, so that one error names all of them. Nothing here touches a tensor or a rank.

mod aliases;
mod asked;
mod error;
mod explain;
mod given;
mod keys;
mod nearest;
mod plan;
mod read;
mod resolve;
mod source;

pub use asked::Asked;
pub use error::{DeepSpeedError, Problem};
pub use explain::{ExplainedLine, Explanation};
pub use given::{Argument, Betas, Given, StepCounts, WarmupLength};
pub use keys::{Effect, KEYS, Key, Kind, key_table};
pub use plan::{
    ActivationPlan, AdagradPlan, AdamPlan, BatchPlan, Became, CheckpointPlan, Compute, DeepSpeedPlan,
    LambPlan, LionPlan, MonitorPlan, Monitors, OffloadDevice, OffloadPlan, OptimizerPlan, PrecisionPlan,
    Resolved, SchedulerPlan, SgdPlan, TagValidation, UnknownTotal, ZeroPlan,
};
pub use read::{DeepSpeedConfig, Found, Setting};
