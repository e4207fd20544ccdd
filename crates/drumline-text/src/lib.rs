//! Text for training: from files to batches of ids, and from hypotheses to BLEU. Needs no libtorch.
//!
//! ```text
//!   corpus: two files, line by line ─▶ lengths ─▶ plan: batches of an epoch, the same on all ranks
//!        │ pair(i)
//!        ▼
//!   tokens: words or pieces ◀─ codec ─▶ vocab: ids       table: CSV, TSV, JSON lines, CoNLL ─▶ examples, labels
//!                                │
//!          ids of a model ─▶ text ─▶ bleu: counts that add up over sentences and ranks ─▶ score
//!
//!   text ─▶ gpt_tokenizer: bytes or BPE ─▶ token_file ─▶ a causal language model ─▶ sampling ─▶ TextStream
//!
//!   synth (translation), synth_text (classification, tagging), synth_story (language modelling): synthetic data in such files
//! ```
//! Errors name the file and the line ([`TextError`]).
#![forbid(unsafe_code)]

/// Compiles the examples of the guide.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/text.md")]
    mod text {}
}

mod beside;
pub mod bleu;
mod codec;
mod corpus;
mod detokens;
mod error;
mod gpt_tokenizer;
mod labels;
mod lines;
mod pieces;
mod plan;
mod random;
mod sampling;
pub mod synth;
pub mod synth_story;
pub mod synth_text;
pub mod table;
mod token_file;
mod tokens;
mod vocab;

pub use codec::Codec;
pub use corpus::{CorpusOptions, LeftOut, ParallelCorpus, Side};
pub use detokens::detokenized;
pub use error::{SamplingError, TextError};
pub use gpt_tokenizer::{END_OF_TEXT, GptTokenizer, TextStream};
pub use labels::Labels;
pub use lines::LineFile;
pub use pieces::Pieces;
pub use plan::{BatchBy, BatchPlan};
pub use sampling::{SamplingOptions, TokenSampler};
pub use token_file::{TokenHeader, for_each_text, write_tokens};
pub use tokens::Tokens;
pub use vocab::{Vocabulary, VocabularyOptions, WordCounts};

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
