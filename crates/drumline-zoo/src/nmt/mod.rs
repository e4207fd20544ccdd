//! Translation with NJUNMT's keys.
//!
//! ```text
//!   NmtConfig: NJUNMT's keys ─┬▶ codecs: sentences as ids ─▶ Bitext: batches of pairs, planned alike on all ranks
//!                             ├▶ parts: Transformer, optimizer, learning rate, loss
//!                             └▶ Bleu: translations in validations, counted over all ranks
//!   Translator: lines ─▶ batches of similar length ─▶ a queue for all ranks ─▶ lines in their order
//! ```
//! The network is in `models::transformer`, the search in `decode`, text and BLEU in `drumline-text`, the commands in
//! `program`.

mod bitext;
mod bleu;
pub mod config;
mod loss;
mod net;
mod schedule;
mod task;
mod translator;
mod validation;

pub use bitext::{Bitext, Codecs, NumberedPairs};
pub(crate) use bleu::options as bleu_options;
pub use bleu::{Judge, References, SourceLines};
pub use config::NmtConfig;
pub use loss::TranslationLoss;
pub(crate) use net::transformer;
pub(crate) use task::{CONFIG, NmtTask};
pub(crate) use translator::write_lines;
pub use translator::{Lines, Translated, Translator, WorkOptions};
