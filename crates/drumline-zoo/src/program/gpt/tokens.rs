//! `drumline-train data synth-story`, `bpe` and `tokens`: texts, a vocabulary of pieces, and files of tokens.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use drumline::{Signal, StopRequest};
use drumline_text::synth_story::{self, SynthStoryOptions};
use drumline_text::{GptTokenizer, TextError, for_each_text, write_tokens};
use indicatif::{ProgressBar, ProgressStyle};

use crate::program::ending::Stopped;

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
        ensure!(!texts.is_empty(), "there is no text in the files; try others");
        let learnt = GptTokenizer::learn(texts, self.size, &self.out)?.vocabulary();
        let few = match (learnt as usize) < self.size {
            true => format!("; of the {} that were asked for, the texts have no more", self.size),
            false => String::new(),
        };
        println!("{learnt} tokens in {}{few}", self.out.display());
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
        // Heard after each text, so that nothing is left behind; others end it at once, as a second one does.
        let stop = StopRequest::listen_for(&[Signal::INT]).context("cannot listen for signals")?;
        let sizes = self.texts.iter().filter_map(|text| Some(text.metadata().ok()?.len()));
        let bar = bar(sizes.sum());
        let written = write_tokens(&self.texts, &tokenizer, &self.out, |bytes| {
            bar.inc(bytes);
            if stop.is_requested() { Err(TextError::Stopped) } else { Ok(()) }
        });
        bar.finish_and_clear();
        let header = match (written, stop.signal()) {
            (Err(TextError::Stopped), Some(signal)) => return Err(Stopped { signal }.into()),
            (written, _) => written?,
        };
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

/// On a terminal; nothing elsewhere.
fn bar(bytes: u64) -> ProgressBar {
    let style = "{bar:24} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
    let style = ProgressStyle::with_template(style).expect("the template is right");
    ProgressBar::new(bytes).with_style(style.progress_chars("━━─"))
}
