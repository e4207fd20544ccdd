//! GPT: training from a file of tokens, and text generation.
//!
//! ```text
//!   text ─▶ drumline data tokens ─▶ TokenData: windows of tokens ─▶ models::gpt ─▶ PerToken, Perplexity
//!   prompt ─▶ Generator: token after token, with a cache ─▶ text
//! ```
//! `drumline-train train --cfg config/gpt-tiny.yaml` trains with it. Other programs can use the parts by themselves.

pub mod config;
mod data;
mod figures;
mod found;
mod generator;
mod task;
pub mod weights;

pub use config::GptConfig;
pub use data::{Begin, TokenData};
pub use figures::{PerToken, Perplexity, TokensPerSecond};
pub(crate) use found::Found;
pub use generator::{Caching, Generator};
pub(crate) use task::GptTask;
