//! The batches that both sides train on: sentences of the translation task that is made by rule, in a file of JSON.

use std::fs;
use std::path::Path;

use anyhow::Context;
use drumline_text::synth::{self, SynthOptions};
use drumline_text::{BatchBy, BatchPlan, Codec, CorpusOptions, ParallelCorpus, Tokens, Vocabulary};
use serde::{Deserialize, Serialize};

/// Steps that the file holds; whoever makes more begins again.
const STEPS: usize = 40;
const RANKS: usize = 2;
/// Ids below it stand for no word.
const FIRST_WORD: u32 = 4;

/// Sentences and their translations.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Batch {
    pub(super) sources: Vec<Vec<i64>>,
    pub(super) targets: Vec<Vec<i64>>,
}

impl Batch {
    /// Words of the translations, each with its end.
    pub(super) fn num_words(&self) -> usize {
        self.targets.iter().map(|words| words.len() + 1).sum()
    }
}

/// A batch for each rank at each step.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Batches {
    pub(super) steps: Vec<Vec<Batch>>,
}

impl Batches {
    /// Batches of at most so many tokens, of sentences of like length: from the whole of an epoch, short ones and long ones by turns.
    pub(super) fn draw(tokens: usize, vocab: i64) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("drumline-bench-{}", std::process::id()));
        let drawn = draw_in(&folder, tokens, vocab);
        let _ = fs::remove_dir_all(&folder);
        drawn
    }

    pub(super) fn write(&self, path: &Path) -> anyhow::Result<()> {
        fs::write(path, serde_json::to_vec(self)?).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{} holds no batches", path.display()))
    }
}

fn draw_in(folder: &Path, tokens: usize, vocab: i64) -> anyhow::Result<Batches> {
    synth::write(folder, &SynthOptions::default())?;
    let [source, target] = ["train.src", "train.tgt"].map(|name| folder.join(name));
    let corpus = ParallelCorpus::open(source, target, &CorpusOptions::default())?;
    let codec = |name: &str| -> anyhow::Result<Codec> {
        Ok(Codec::new(Tokens::Words, Vocabulary::read(folder.join(name), None)?))
    };
    let (source, target) = (codec("vocab.src.json")?, codec("vocab.tgt.json")?);
    // The end of a translation is a token as well.
    let lengths: Vec<_> = corpus.lengths().iter().map(|(source, target)| (*source, target + 1)).collect();
    let plan = BatchPlan { shuffle: true, ..BatchPlan::new(BatchBy::Tokens(tokens)) }.batches(&lengths, 0);
    let groups: Vec<_> = plan.chunks_exact(RANKS).collect();
    let batch = |indices: &Vec<usize>| -> anyhow::Result<Batch> {
        let mut batch = Batch { sources: Vec::new(), targets: Vec::new() };
        for index in indices {
            let (from, to) = corpus.pair(*index)?;
            batch.sources.push(spread(source.encode(&from)?, source.vocabulary().len(), vocab));
            batch.targets.push(spread(target.encode(&to)?, target.vocabulary().len(), vocab));
        }
        Ok(batch)
    };
    // A stride that shares no factor with the number of groups meets all of them.
    let stride = (groups.len() * 5 / 13..).find(|stride| gcd(*stride, groups.len()) == 1).unwrap_or(1);
    let steps = (0..STEPS).map(|step| groups[step * stride % groups.len()].iter().map(batch).collect());
    Ok(Batches { steps: steps.collect::<anyhow::Result<_>>()? })
}

/// Moves the words of a small vocabulary over a larger one, at equal distances.
fn spread(ids: Vec<u32>, from: usize, to: i64) -> Vec<i64> {
    let distance = ((to - i64::from(FIRST_WORD)) / (from as i64 - i64::from(FIRST_WORD)).max(1)).max(1);
    let first = i64::from(FIRST_WORD);
    ids.into_iter().map(|id| (i64::from(id) - first) * distance + first).map(|id| id.min(to - 1)).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
