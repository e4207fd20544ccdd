//! The command line of `drumline-train`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use drumline_text::synth::{self, SynthOptions};
use drumline_text::synth_text::{self, SynthTextOptions};
use drumline_text::{LineFile, Vocabulary, VocabularyOptions, WordCounts};

use super::bench_gpu::BenchGpuArgs;
use super::bench_loader::BenchLoaderArgs;
use super::bench_observe::BenchObserveArgs;
use super::bench_step::BenchStepArgs;
use super::bench_transformer::BenchTransformerArgs;
use super::doctor::DoctorGpuArgs;
use super::gpt::{BpeArgs, ExportArgs, GenerateArgs, StoryArgs, TokensArgs};
use super::kind::Kind;
use super::nmt::NmtArgs;
use super::translate::TranslateArgs;
use crate::config::setting::Setting;
use crate::config::{DeviceKind, Value};
use crate::synth_cifar;

const EXAMPLES: &str = "\
Examples:
  drumline-train train --cfg config/cifar-resnet18.yaml OPTIM.MAX_EPOCH 2
  drumline run --nproc-per-node 2 drumline-train train --cfg config/cifar-resnet18.yaml
  drumline-train train --cfg config/text-classify.yaml
  drumline-train data synth-cifar --out data/cifar --train 4000 --test 1000
  drumline-train data synth-text --out data/text
  drumline-train data tokens story.txt --out story.tokens
  drumline-train generate --from exp/gpt-tiny \"Ada had a\"
  drumline-train keys

drumline train starts this program with as many ranks as it is told to.";

/// Train and evaluate networks; one rank of a run
#[derive(Debug, Parser)]
#[command(name = "drumline-train", version, after_help = EXAMPLES)]
pub(super) struct Cli {
    /// Say what is wrong with the command's configuration and files, and do nothing else
    #[arg(long, hide = true)]
    pub(super) check: bool,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Train a network
    Train(TrainArgs),
    /// Evaluate a network on the test set: its last checkpoint (text: its best), or MODEL.WEIGHTS
    Test(TestArgs),
    Nmt(Box<NmtArgs>),
    Translate(Box<TranslateArgs>),
    Generate(Box<GenerateArgs>),
    Export(ExportArgs),
    /// Make data sets
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// List the keys of a configuration with their defaults
    Keys {
        /// What the configuration is for
        #[arg(value_enum, default_value_t = Kind::Images)]
        kind: Kind,
        /// As a JSON schema, by which editors complete keys
        #[arg(long)]
        schema: bool,
    },
    /// Look at what this machine has, and what is missing
    Doctor {
        #[command(subcommand)]
        command: DoctorCommand,
    },
    #[command(hide = true)]
    BenchGpu(BenchGpuArgs),
    #[command(hide = true)]
    BenchObserve(BenchObserveArgs),
    #[command(hide = true)]
    BenchStep(BenchStepArgs),
    #[command(hide = true)]
    BenchLoader(BenchLoaderArgs),
    #[command(hide = true)]
    BenchTransformer(BenchTransformerArgs),
}

#[derive(Debug, Subcommand)]
pub(super) enum DoctorCommand {
    Gpu(DoctorGpuArgs),
}

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
    /// The first K steps are made by one rank and by all, and compared; nothing is kept [default: 5 steps]
    #[arg(long, value_name = "K", num_args = 0..=1, require_equals = true, default_missing_value = "5", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) verify_parity: Option<u64>,
}

#[derive(Debug, Args)]
pub(super) struct TestArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// What makes a configuration.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The configuration, a YAML file
    #[arg(long, aliases = ["config_path", "config-path"], value_name = "FILE")]
    pub(super) cfg: PathBuf,
    /// What computes: auto, cpu or cuda; wins over the key DEVICE (translation: run_configs.device)
    #[arg(long, value_name = "DEVICE", value_parser = device_kind)]
    pub(super) device: Option<DeviceKind>,
    /// Keys of the configuration with their values, which win over the file
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_names = ["KEY", "VALUE"])]
    pub(super) pairs: Vec<String>,
}

/// The value of a flag `--device`.
pub(super) fn device_kind(text: &str) -> Result<DeviceKind, String> {
    // As people say it.
    let text = if text == "gpu" { "cuda" } else { text };
    DeviceKind::read(&Value::Text(text.to_owned()))
        .ok_or_else(|| format!("expected {}", DeviceKind::expects()))
}

#[derive(Debug, Subcommand)]
pub(super) enum DataCommand {
    /// A learnable data set in CIFAR-10's binary format
    #[command(name = "synth-cifar")]
    Cifar(SynthCifarArgs),
    /// Texts to classify, as CSV, and sentences to tag, in CoNLL's columns
    #[command(name = "synth-text")]
    Text(SynthTextArgs),
    /// Two languages made by rule, as parallel text with vocabularies
    #[command(name = "synth-translation")]
    Translation(SynthTranslationArgs),
    /// Short stories, a text to learn to continue
    #[command(name = "synth-story")]
    Story(StoryArgs),
    /// The words of a text with their counts, as translations need them
    Vocabulary(VocabularyArgs),
    Bpe(BpeArgs),
    Tokens(TokensArgs),
}

impl DataCommand {
    pub(super) fn write(&self) -> anyhow::Result<()> {
        match self {
            Self::Cifar(args) => args.write(),
            Self::Text(args) => args.write(),
            Self::Translation(args) => args.write(),
            Self::Story(args) => args.write(),
            Self::Vocabulary(args) => args.write(),
            Self::Bpe(args) => args.write(),
            Self::Tokens(args) => args.write(),
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct SynthCifarArgs {
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of training images
    #[arg(long, value_name = "N", default_value = "4000", value_parser = clap::value_parser!(u64).range(1..))]
    train: u64,
    /// Number of test images
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u64).range(1..))]
    test: u64,
    /// Other images for another seed
    #[arg(long, value_name = "S", default_value = "0")]
    seed: u64,
}

impl SynthCifarArgs {
    fn write(&self) -> anyhow::Result<()> {
        synth_cifar::write(&self.out, self.train as usize, self.test as usize, self.seed)?;
        println!("{} training and {} test images in {}", self.train, self.test, self.out.display());
        Ok(())
    }
}

#[derive(Debug, Args)]
pub(super) struct SynthTextArgs {
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of texts to train on
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().train)]
    train: usize,
    /// Number of texts to choose a model by
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().dev)]
    dev: usize,
    /// Number of texts to judge it by
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().test)]
    test: usize,
    /// Other texts for another seed
    #[arg(long, value_name = "S", default_value_t = SynthTextOptions::default().seed)]
    seed: u64,
}

impl SynthTextArgs {
    fn write(&self) -> anyhow::Result<()> {
        let (out, &Self { train, dev, test, seed, .. }) = (self.out.display(), self);
        synth_text::write(&self.out, &SynthTextOptions { train, dev, test, seed })?;
        println!(
            "{train} training, {dev} dev and {test} test texts in {out}, as .csv with labels and as .conll with tags"
        );
        Ok(())
    }
}

#[derive(Debug, Args)]
pub(super) struct SynthTranslationArgs {
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of pairs to train on
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().train)]
    train: usize,
    /// Number of pairs to choose a model by
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().valid)]
    valid: usize,
    /// Number of pairs to judge it by
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().test)]
    test: usize,
    /// Other languages for another seed
    #[arg(long, value_name = "S", default_value_t = SynthOptions::default().seed)]
    seed: u64,
}

impl SynthTranslationArgs {
    fn write(&self) -> anyhow::Result<()> {
        let (out, &Self { train, valid, test, seed, .. }) = (self.out.display(), self);
        synth::write(&self.out, &SynthOptions { train, valid, test, seed })?;
        println!("{train} training, {valid} validation and {test} test pairs in {out}");
        Ok(())
    }
}

#[derive(Debug, Args)]
pub(super) struct VocabularyArgs {
    /// Texts, a sentence a line, words or pieces between spaces
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// File to write: NJUNMT's JSON where the name ends in .json, else lines of word and count
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Ids in all, the most frequent words first [default: any number]
    #[arg(long, alias = "max_n_words", value_name = "N")]
    max_n_words: Option<usize>,
    /// Rarer words are left out
    #[arg(long, alias = "min_count", value_name = "N", default_value_t = 1)]
    min_count: u64,
}

impl VocabularyArgs {
    fn write(&self) -> anyhow::Result<()> {
        let mut counts = WordCounts::default();
        for text in &self.texts {
            LineFile::open_with(text, |line| {
                counts.add(line.split_whitespace());
                Ok(())
            })?;
        }
        let &Self { max_n_words, min_count, .. } = self;
        let vocabulary = Vocabulary::build(counts, &VocabularyOptions { max_n_words, min_count });
        vocabulary.write(&self.out)?;
        println!("{} words and specials in {}", vocabulary.len(), self.out.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_sets_are_made() {
        let folder = tempfile::tempdir().unwrap();
        for (words, files) in [
            ("synth-cifar --train 5 --test 1", ["data_batch_5.bin", "test_batch.bin"]),
            ("synth-text --train 5 --dev 2 --test 1", ["train.csv", "dev.conll"]),
            ("synth-story --train 5 --valid 2", ["train.txt", "valid.txt"]),
            ("synth-translation --train 5 --valid 2 --test 1 --seed 3", ["valid.src", "vocab.tgt.json"]),
        ] {
            let name = words.split(' ').next().unwrap();
            let out = folder.path().join(name);
            let words = ["drumline-train", "data"].into_iter().chain(words.split(' '));
            let cli = Cli::try_parse_from(words.chain(["--out", out.to_str().unwrap()])).unwrap();
            let Command::Data { command } = cli.command else { panic!("{name}: {cli:?}") };
            command.write().unwrap();
            assert!(files.iter().all(|file| out.join(file).is_file()), "{name}");
        }
    }
}
