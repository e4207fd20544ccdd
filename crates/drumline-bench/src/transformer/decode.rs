//! Translations of the first sentences of the file, by beam search.

use std::time::Instant;

use serde_json::json;

use super::batches::Batches;
use super::{TransformerArgs, median};
use drumline_zoo::decode::{BeamOptions, beam_search};
use drumline_zoo::models::transformer::{Transformer, padded};

pub(super) fn run(args: &TransformerArgs, model: &Transformer, batches: &Batches) -> anyhow::Result<()> {
    let all = batches.steps.iter().flatten().flat_map(|batch| &batch.sources);
    let sources: Vec<_> = all.take(args.sentences).cloned().collect();
    let options = BeamOptions {
        beam_size: args.beam,
        max_steps: args.words,
        batch: args.sentences,
        ..Default::default()
    };
    let (mut times, mut best) = (Vec::new(), Vec::new());
    for _ in 0..1 + args.steps {
        let began = Instant::now();
        best = beam_search(&[model], &padded(&sources, 0), &options)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    times.remove(0);
    let words: usize = best.iter().map(|found| found[0].tokens.len()).sum();
    let scores: Vec<_> = best.iter().map(|found| found[0].score).collect();
    let step_ms = median(times);
    let line = json!({"step_ms": step_ms, "tokens_per_s": words as f64 / step_ms * 1e3, "words": words, "scores": scores});
    println!("{line}");
    Ok(())
}
