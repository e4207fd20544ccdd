//! `drumline-train data synth-story`, `bpe` and `tokens`: texts, a vocabulary of pieces, and files of tokens.

use std::path::PathBuf;

use clap::Args;
use drumline_text::synth_story::{self, SynthStoryOptions};
use drumline_text::{GptTokenizer, for_each_text, write_tokens};

#[derive(Debug, Args)]
pub(in crate::program) struct StoryArgs {
    /// Folder to write to: train.txt and valid.txt
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of stories to train on
    #[arg(long, value_name = "N", default_value_t = SynthStoryOptions::default().train)]
    train: usize,
    /// Number of stories to evaluate with
    #[arg(long, value_name = "N", default_value_t = SynthStoryOptions::default().valid)]
    valid: usize,
    /// Other stories for another seed
    #[arg(long, value_name = "S", default_value_t = SynthStoryOptions::default().seed)]
    seed: u64,
}

impl StoryArgs {
    pub(in crate::program) fn write(&self) -> anyhow::Result<()> {
        let (out, &Self { train, valid, seed, .. }) = (self.out.display(), self);
        synth_story::write(&self.out, &SynthStoryOptions { train, valid, seed })?;
        println!("{train} training and {valid} validation stories in {out}");
        Ok(())
    }
}

/// A vocabulary of pieces learnt from texts: GPT-2's byte-level BPE, as vocab.json and merges.txt
#[derive(Debug, Args)]
pub(in crate::program) struct BpeArgs {
    /// Texts; <|endoftext|> stands between several of a file
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Tokens in all; GPT-2 has 50257
    #[arg(long, value_name = "N", default_value_t = 1024)]
    size: usize,
}

impl BpeArgs {
    pub(in crate::program) fn write(&self) -> anyhow::Result<()> {
        let mut texts = Vec::new();
        for path in &self.texts {
            for_each_text(path, |text| {
                texts.push(text.to_owned());
                Ok(())
            })?;
        }
        let learnt = GptTokenizer::learn(texts, self.size, &self.out)?;
        println!("{} tokens in {}", learnt.vocabulary(), self.out.display());
        Ok(())
    }
}

/// A file of tokens to train a GPT on, made from texts
#[derive(Debug, Args)]
pub(in crate::program) struct TokensArgs {
    /// Texts; <|endoftext|> stands between several of a file
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// What makes tokens: bytes, a tokenizer.json, or a folder with one or with GPT-2's vocab.json and merges.txt
    #[arg(long, value_name = "NAME", default_value = "bytes")]
    tokenizer: PathBuf,
}

impl TokensArgs {
    pub(in crate::program) fn write(&self) -> anyhow::Result<()> {
        let tokenizer = GptTokenizer::open(&self.tokenizer)?;
        let header = write_tokens(&self.texts, &tokenizer, &self.out)?;
        println!(
            "{} tokens of a vocabulary of {}, {} bytes each, in {}",
            header.count,
            header.vocabulary,
            header.width,
            self.out.display()
        );
        Ok(())
    }
}
