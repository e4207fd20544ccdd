//! `drumline-train bench-transformer`: steps and translations that `bench/peers/transformer.py` times as well. Weights and words are formulas, so that
//! losses and translations can be compared.

use std::time::Instant;

use clap::{Args, ValueEnum};
use drumline::trainer::{CrossEntropy, Loss, Mode, Model};
use drumline_torch::{flush_denormals, keep_freed_memory, parameters, take_grad};
use serde_json::{Value, json};
use tch::Device;
use tch::nn::VarStore;

use crate::decode::{BeamOptions, beam_search};
use crate::formula::fill;
use crate::models::transformer::{Pairs, Specials, Transformer, TransformerOptions, padded};

const WARM_UP: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Forward and backward.
    Train,
    /// Beam search.
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Size {
    /// 3 layers of 128, 2000 words.
    Small,
    /// The base model with 10000 words.
    Base,
}

/// Time a Transformer, on one thread
#[derive(Debug, Args)]
pub(super) struct BenchTransformerArgs {
    /// What is timed
    #[arg(long)]
    work: Work,
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// Sentences of a batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Timed steps
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Probability of dropout
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// Translations kept of each sentence
    #[arg(long, default_value_t = 5)]
    beam: usize,
    /// Words of a translation
    #[arg(long, default_value_t = 40)]
    words: usize,
}

/// Prints one JSON line.
pub(super) fn run(args: &BenchTransformerArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let store = VarStore::new(Device::Cpu);
    let model = Transformer::new(&store.root(), &options(args))?;
    fill(&store);
    let vocab = model.options().src_vocab;
    let sources: Vec<_> = (0..args.batch as i64).map(|place| sentence(place, vocab)).collect();
    let line = match args.work {
        Work::Train => train(args, &store, &model, &sources)?,
        Work::Decode => decode(args, &model, &sources)?,
    };
    println!("{line}");
    Ok(())
}

fn options(args: &BenchTransformerArgs) -> TransformerOptions {
    let dropout = args.dropout;
    let base = TransformerOptions { dropout, src_vocab: 10000, tgt_vocab: 10000, ..Default::default() };
    match args.size {
        Size::Base => base,
        Size::Small => TransformerOptions {
            n_layers: 3,
            n_head: 4,
            d_word_vec: 128,
            d_model: 128,
            d_inner_hid: 512,
            src_vocab: 2000,
            tgt_vocab: 2000,
            ..base
        },
    }
}

/// 10 to 29 words that depend on the place alone.
fn sentence(place: i64, vocab: i64) -> Vec<i64> {
    (0..10 + place * 7 % 20).map(|word| 4 + (place * 31 + word * 17) % (vocab - 4)).collect()
}

fn train(
    args: &BenchTransformerArgs,
    store: &VarStore,
    model: &Transformer,
    sources: &[Vec<i64>],
) -> anyhow::Result<Value> {
    let targets: Vec<_> =
        (0..args.batch as i64).map(|place| sentence(place + 3, model.options().tgt_vocab)).collect();
    let loss = CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() };
    let (mut times, mut mean) = (Vec::new(), 0.0);
    let words: usize = targets.iter().map(|words| words.len() + 1).sum();
    for _ in 0..WARM_UP + args.steps {
        for named in parameters(store) {
            take_grad(&named.tensor)?;
        }
        let batch = Pairs::new(sources, &targets, Specials::default());
        let began = Instant::now();
        let logits = model.forward_batch(&batch, Mode::Train).map_err(anyhow::Error::from_boxed)?;
        let sum = loss.sum(&logits, &batch).map_err(anyhow::Error::from_boxed)?;
        let value = sum / words as f64;
        value.f_backward()?;
        times.push(began.elapsed().as_secs_f64());
        mean = value.double_value(&[]);
    }
    let step = median(times);
    Ok(json!({"step_ms": step * 1e3, "tokens_per_s": words as f64 / step, "loss": mean}))
}

fn decode(args: &BenchTransformerArgs, model: &Transformer, sources: &[Vec<i64>]) -> anyhow::Result<Value> {
    let options =
        BeamOptions { beam_size: args.beam, max_steps: args.words, batch: args.batch, ..Default::default() };
    let (mut times, mut best) = (Vec::new(), Vec::new());
    for _ in 0..1 + args.steps {
        let began = Instant::now();
        best = beam_search(&[model], &padded(sources, 0), &options)?;
        times.push(began.elapsed().as_secs_f64());
    }
    let words: usize = best.iter().map(|found| found[0].tokens.len()).sum();
    let scores: Vec<_> = best.iter().map(|found| found[0].score).collect();
    let step = median(times);
    Ok(json!({"step_ms": step * 1e3, "tokens_per_s": words as f64 / step, "words": words, "scores": scores}))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
