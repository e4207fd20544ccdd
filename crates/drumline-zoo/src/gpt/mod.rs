//! Models that continue text: from a file of tokens to a trained GPT, and from a prompt to what follows.
//!
//! ```text
//!   text ─▶ drumline data tokens ─▶ TokenData: windows of tokens ─▶ models::gpt ─▶ PerToken, Perplexity
//!   prompt ─▶ Generator: token after token, with a cache ─▶ text
//! ```
//! The program that trains is `drumline-train train --cfg config/gpt-tiny.yaml`; a program of your own takes the parts from here.

pub mod config;
mod data;
mod figures;
mod generator;
pub mod weights;

pub use config::GptConfig;
pub use data::{Begin, TokenData};
pub use figures::{PerToken, Perplexity, TokensPerSecond};
pub use generator::{Caching, Generator};
