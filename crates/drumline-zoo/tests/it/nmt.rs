//! Translation: training and translation programs, with their own text files and folders.

mod bad_input;
mod deepspeed;
mod learning;
mod translating;
mod uneven;

use std::path::PathBuf;

use drumline_text::synth::{self, SynthOptions};
use serde_json::Value;
use tempfile::TempDir;

use super::running::{Rank, column, ended, events, start};

/// 100 training pairs, 13 validation pairs, 11 pairs to translate, and a configuration.
struct Task {
    folder: TempDir,
}

const CONFIG: &str = "\
data_configs:
  train_data: [DIR/train.src, DIR/train.tgt]
  valid_data: [DIR/valid.src, DIR/valid.tgt]
  vocabularies:
    - {type: word, dict_path: DIR/vocab.src.json}
    - {type: word, dict_path: DIR/vocab.tgt.json}
model_configs: {n_layers: 1, n_head: 2, d_word_vec: 16, d_model: 16, d_inner_hid: 32, dropout: 0.0, proj_share_weight: true}
optimizer_configs:
  learning_rate: 0.02
  grad_clip: 1.0
  optimizer_params: ~
  scheduler_configs: {warmup_steps: 20}
training_configs:
  max_epochs: 2
  shuffle: true
  batch_size: 64
  batching_key: tokens
  norm_by_words: true
  disp_freq: 2
  save_freq: 4
  loss_valid_freq: 4
  bleu_valid_freq: 8
  bleu_valid_configs: {max_steps: 12, beam_size: 2}
run_configs: {saveto: DIR/save, log_path: DIR/log, valid_path: DIR/valid}
";

impl Task {
    fn new() -> Self {
        Self::of(&SynthOptions { train: 100, valid: 13, test: 11, ..SynthOptions::default() })
    }

    fn of(options: &SynthOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        synth::write(folder.path(), options).unwrap();
        let text = CONFIG.replace("DIR", folder.path().to_str().unwrap());
        std::fs::write(folder.path().join("nmt.yaml"), text).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Runs `drumline-train`. `words` are split at spaces, and `DIR` stands for the folder.
    fn run(&self, nproc: usize, words: &str) -> Vec<Rank> {
        let dir = self.folder.path().to_str().unwrap();
        ended(start(nproc, words.split_whitespace().map(|word| word.replace("DIR", dir)).collect()))
    }

    /// Runs it, asserts that all ranks succeed, and returns the output of rank 0.
    fn passes(&self, nproc: usize, words: &str) -> String {
        let ranks = self.run(nproc, words);
        for rank in &ranks {
            assert!(rank.exit.is_success(), "{words}: {}{}", rank.stdout, rank.stderr);
        }
        ranks[0].stdout.clone()
    }

    fn train(&self, nproc: usize, pairs: &str) -> String {
        self.passes(nproc, &format!("nmt --config_path DIR/nmt.yaml {pairs}"))
    }

    /// The lines of `metrics.jsonl`.
    fn events(&self) -> Vec<Value> {
        events(&self.path("log/metrics.jsonl"))
    }

    fn column(&self, kind: &str, key: &str) -> Vec<f64> {
        column(&self.events(), kind, key)
    }
}

/// The greatest relative difference.
fn difference(some: &[f64], others: &[f64]) -> f64 {
    assert_eq!(some.len(), others.len());
    some.iter().zip(others).map(|(some, other)| (some - other).abs() / other.abs()).fold(0.0, f64::max)
}
