//! `drumline-bench transformer`: what `cargo xtask bench transformer` times on our side; `bench/peers/transformer.py` is the other.
//!
//! ```text
//!   --work batches ─▶ a file of batches ─┬▶ --work train    ranks of a group: forward, loss, backward, Adam
//!                                        └▶ --work decode   one process: beam search
//! ```
//! Weights are formulas and batches come from the file, so that both sides train the same and losses and translations can be compared.

mod batches;
mod decode;
mod train;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::Device;
use tch::nn::VarStore;

use batches::Batches;
use drumline_zoo::formula::fill;
use drumline_zoo::models::transformer::{Transformer, TransformerOptions};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Write the file of batches.
    Batches,
    /// Training steps.
    Train,
    /// Beam search.
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Size {
    /// 2 layers of 128 and the task's own words.
    Small,
    /// 3 layers of 256, 8000 words.
    Middle,
    /// The base model: 6 layers of 512, 8000 words.
    Base,
}

impl Size {
    fn options(self, dropout: f64) -> TransformerOptions {
        let base = TransformerOptions { dropout, src_vocab: 8000, tgt_vocab: 8000, ..Default::default() };
        let sized = |n_layers, d_model, vocab| TransformerOptions {
            n_layers,
            n_head: 4,
            d_word_vec: d_model,
            d_model,
            d_inner_hid: 4 * d_model,
            src_vocab: vocab,
            tgt_vocab: vocab,
            ..base.clone()
        };
        match self {
            Self::Small => sized(2, 128, 300),
            Self::Middle => sized(3, 256, 8000),
            Self::Base => base,
        }
    }

    /// Tokens of a rank's batch, padding included.
    fn tokens(self) -> usize {
        match self {
            Self::Small | Self::Middle => 2048,
            Self::Base => 1024,
        }
    }
}

/// Time a Transformer, one thread a rank
#[derive(Debug, Args)]
pub(super) struct TransformerArgs {
    /// What is done
    #[arg(long)]
    work: Work,
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// The file of batches
    #[arg(long)]
    batches: PathBuf,
    /// Timed steps
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Steps before them
    #[arg(long, default_value_t = 2)]
    warm_up: usize,
    /// Probability of dropout
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Sentences that are translated at once
    #[arg(long, default_value_t = 16)]
    sentences: usize,
    /// Translations kept of each sentence
    #[arg(long, default_value_t = 5)]
    beam: usize,
    /// Most words of a translation
    #[arg(long, default_value_t = 30)]
    words: usize,
}

/// Rank 0 prints one JSON line.
pub(super) fn run(args: &TransformerArgs) -> anyhow::Result<()> {
    let options = args.size.options(args.dropout);
    if args.work == Work::Batches {
        return Batches::draw(args.size.tokens(), options.tgt_vocab)?.write(&args.batches);
    }
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let batches = Batches::read(&args.batches)?;
    let store = VarStore::new(Device::Cpu);
    let model = Transformer::new(&store.root(), &options)?;
    fill(&store);
    match args.work {
        Work::Decode => decode::run(args, &model, &batches),
        _ => train::run(args, model, &store, &batches),
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
