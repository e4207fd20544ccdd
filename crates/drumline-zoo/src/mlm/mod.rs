//! Masked language modelling: a BERT learns to predict words that are masked in texts.
//!
//! ```text
//!   train.csv ─▶ text::Texts ─▶ Lexicon: word ids ─▶ MaskedData: masked batches ─▶ models::bert
//!                                                                              └▶ loss, perplexity, accuracy
//! ```
//! `drumline-train train --cfg config/bert-small.yaml` trains with it. Other programs can use the parts by themselves.

pub mod config;
mod data;
mod masking;
mod task;
pub mod weights;

pub use config::MlmConfig;
pub use data::{MaskedData, Masks};
pub use masking::Masking;
pub(crate) use task::MlmTask;
