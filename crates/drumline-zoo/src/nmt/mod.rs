//! Translation as NJUNMT's users do it.
//!
//! ```text
//!   NmtConfig: NJUNMT's keys ─┬▶ codecs: sentences as ids ─▶ Bitext: batches of pairs, planned alike on all ranks
//!                             ├▶ parts: Transformer, optimizer, learning rate, loss
//!                             └▶ Bleu: translations in validations, counted over all ranks
//!   Translator: lines ─▶ batches of like length ─▶ ranks take them as they come to them ─▶ lines in their order
//! ```
//! Not here: the network (`models::transformer`), the search (`decode`), text and BLEU (`drumline-text`), the programs (`program`).

mod bitext;
mod bleu;
pub mod config;
mod parts;
mod translator;
mod validation;

pub use bitext::{Bitext, Codecs, NumberedPairs};
pub(crate) use bleu::{Bleu, options as bleu_options};
pub use bleu::{Judge, References};
pub use config::NmtConfig;
pub use parts::TranslationLoss;
pub(crate) use parts::{NmtTrainer, Words, optimizer_keys, transformer, with_learning_rate};
pub(crate) use translator::write_lines;
pub use translator::{Lines, Translated, Translator, WorkOptions};
pub(crate) use validation::{Due, Validation};
