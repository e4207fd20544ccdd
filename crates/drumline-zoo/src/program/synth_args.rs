//! `drumline-train data …`: generates synthetic datasets and vocabularies.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use drumline_text::synth::{self, SynthOptions};
use drumline_text::synth_text::{self, SynthTextOptions};
use drumline_text::{LineFile, Vocabulary, VocabularyOptions, WordCounts};

use super::tokens::{BpeArgs, StoryArgs, TokensArgs};
use crate::synth_cifar;

#[derive(Debug, Subcommand)]
pub(super) enum DataCommand {
    /// A synthetic dataset in CIFAR-10's binary format
    #[command(name = "synth-cifar")]
    Cifar(SynthCifarArgs),
    /// Texts to classify, as CSV, and sentences to tag, in CoNLL's columns
    #[command(name = "synth-text")]
    Text(SynthTextArgs),
    /// Parallel text in two synthetic languages, with vocabularies
    #[command(name = "synth-translation")]
    Translation(SynthTranslationArgs),
    /// Short stories, to train a GPT on
    #[command(name = "synth-story")]
    Story(StoryArgs),
    /// A vocabulary: the words of a text with their counts, for translation
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
    /// Seed of the images
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
    /// Number of training texts
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().train)]
    train: usize,
    /// Number of validation texts
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().dev)]
    dev: usize,
    /// Number of test texts
    #[arg(long, value_name = "N", default_value_t = SynthTextOptions::default().test)]
    test: usize,
    /// Seed of the texts
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
    /// Number of training pairs
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().train)]
    train: usize,
    /// Number of validation pairs
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().valid)]
    valid: usize,
    /// Number of test pairs
    #[arg(long, value_name = "N", default_value_t = SynthOptions::default().test)]
    test: usize,
    /// Seed of the languages
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
    /// Texts with one sentence per line, and spaces between words or word pieces
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// File to write: NJUNMT's JSON where the name ends in .json, else lines of word and count
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Size of the vocabulary, the most frequent words first [default: unlimited]
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
    use clap::Parser;

    use super::super::args::{Cli, Command};

    #[test]
    fn datasets_are_written() {
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
