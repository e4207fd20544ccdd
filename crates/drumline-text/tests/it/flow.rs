//! The whole path from files to BLEU, with ranks that divide an epoch and sum their counts.

use drumline_text::bleu::BleuStats;
use drumline_text::synth::{self, SynthOptions};
use drumline_text::{BatchBy, BatchPlan, Codec, CorpusOptions, ParallelCorpus, Side, Tokens, Vocabulary};
use std::path::Path;

const OPTIONS: SynthOptions = SynthOptions { train: 600, valid: 10, test: 90, seed: 3 };

fn corpus(folder: &Path, name: &str, max_len: Option<u32>) -> ParallelCorpus {
    let [source, target] = ["src", "tgt"].map(|side| folder.join(format!("{name}.{side}")));
    let side = Side { max_len, ..Side::default() };
    let options = CorpusOptions { source: side.clone(), target: side };
    ParallelCorpus::open(source, target, &options).unwrap()
}

fn codec(folder: &Path, name: &str) -> Codec {
    Codec::new(Tokens::Words, Vocabulary::read(folder.join(name), None).unwrap())
}

/// The counts of a rank whose model misses every tenth word.
fn counts_of_rank(folder: &Path, rank: usize, world_size: usize) -> BleuStats {
    let (corpus, codec) = (corpus(folder, "test", None), codec(folder, "vocab.tgt.json"));
    let plan = BatchPlan { shuffle: true, ..BatchPlan::new(BatchBy::Tokens(100)) };
    let mut stats = BleuStats::default();
    for index in plan.batches(corpus.lengths(), 1).iter().skip(rank).step_by(world_size).flatten() {
        let (_, reference) = corpus.pair(*index).unwrap();
        let mut ids = codec.encode(&reference).unwrap();
        ids.iter_mut().step_by(10).for_each(|id| *id = Vocabulary::UNK);
        ids.extend([Vocabulary::EOS, Vocabulary::PAD]);
        stats += BleuStats::of_sentence(&codec.decode(&ids).unwrap(), &[&reference]);
    }
    stats
}

#[test]
fn the_score_does_not_depend_on_the_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    synth::write(folder.path(), &OPTIONS).unwrap();
    let alone = counts_of_rank(folder.path(), 0, 1);
    assert!(alone.score() > 50.0 && alone.score() < 95.0, "{alone}");
    for world_size in [2, 3, 200] {
        let mut sums = [0.0; 10];
        for rank in 0..world_size {
            let counts = counts_of_rank(folder.path(), rank, world_size).to_sums();
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        assert_eq!(BleuStats::from_sums(&sums), alone, "{world_size} ranks");
    }
}

#[test]
fn a_vocabulary_of_the_training_text_has_all_words_of_the_test() {
    let folder = tempfile::tempdir().unwrap();
    synth::write(folder.path(), &OPTIONS).unwrap();
    let (corpus, source) = (corpus(folder.path(), "test", None), codec(folder.path(), "vocab.src.json"));
    for index in 0..corpus.len() {
        let (text, _) = corpus.pair(index).unwrap();
        let ids = source.encode(&text).unwrap();
        assert!(!ids.contains(&Vocabulary::UNK), "{text}");
        assert_eq!(source.decode(&ids).unwrap(), text);
    }
}

#[test]
fn limits_hold_from_file_to_batch() {
    let folder = tempfile::tempdir().unwrap();
    synth::write(folder.path(), &OPTIONS).unwrap();
    let (all, short) = (corpus(folder.path(), "train", None), corpus(folder.path(), "train", Some(9)));
    let left_out = short.left_out();
    assert!(left_out.too_long > 0 && left_out.too_long + short.len() == all.len(), "{left_out}");
    assert_ne!(all.fingerprint(), short.fingerprint());
    let batches = BatchPlan::new(BatchBy::Tokens(45)).batches(short.lengths(), 0);
    for batch in batches {
        let words = |index: &usize| {
            let (source, target) = short.pair(*index).unwrap();
            source.split(' ').count().max(target.split(' ').count())
        };
        let width = batch.iter().map(words).max().unwrap();
        assert!(width <= 9 && width * batch.len() <= 45);
    }
}
