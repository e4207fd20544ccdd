//! Models, data sets and the ready programs. The binary `drumline-train` is a thin door to [`program`].
//!
//! ```text
//!   --cfg FILE KEY VALUE … ─▶ config ─▶ program: train, test ─┬▶ progress: a bar or lines, for people
//!                                                             └▶ events: metrics.jsonl, for programs
//! ```
#![forbid(unsafe_code)]

pub mod config;
pub mod events;
pub mod program;
pub mod progress;
