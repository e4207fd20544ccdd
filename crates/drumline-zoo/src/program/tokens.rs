//! `drumline-train data synth-story`, `bpe` and `tokens`: generates texts, BPE vocabularies and token files.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use drumline::StopRequest;
use drumline::launch::Signal;
use drumline_text::synth_story::{self, SynthStoryOptions};
use drumline_text::{GptTokenizer, TextError, for_each_text, write_tokens};
use indicatif::{ProgressBar, ProgressStyle};

use crate::driver::Stopped;

#[derive(Debug, Args)]
pub(super) struct StoryArgs {
    /// Folder to write to: train.txt and valid.txt
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Number of training stories
    #[arg(long, value_name = "N", default_value_t = SynthStoryOptions::default().train)]
    train: usize,
    /// Number of validation stories
    #[arg(long, value_name = "N", default_value_t = SynthStoryOptions::default().valid)]
    valid: usize,
    /// Seed of the stories
    #[arg(long, value_name = "S", default_value_t = SynthStoryOptions::default().seed)]
    seed: u64,
}

impl StoryArgs {
    pub(super) fn write(&self) -> anyhow::Result<()> {
        let (out, &Self { train, valid, seed, .. }) = (self.out.display(), self);
        synth_story::write(&self.out, &SynthStoryOptions { train, valid, seed })?;
        println!("{train} training and {valid} validation stories in {out}");
        Ok(())
    }
}

/// Learn a byte-level BPE vocabulary from texts, as in GPT-2: vocab.json and merges.txt
#[derive(Debug, Args)]
pub(super) struct BpeArgs {
    /// Texts; several in one file are separated by <|endoftext|>
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// Folder to write to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Size of the vocabulary; GPT-2 has 50257
    #[arg(long, value_name = "N", default_value_t = 1024)]
    size: usize,
}

impl BpeArgs {
    pub(super) fn write(&self) -> anyhow::Result<()> {
        let mut texts = Vec::new();
        for path in &self.texts {
            for_each_text(path, |text| {
                texts.push(text.to_owned());
                Ok(())
            })?;
        }
        ensure!(!texts.is_empty(), "there is no text in the files; try others");
        let learnt = GptTokenizer::learn(texts, self.size, &self.out)?.vocabulary();
        let few = if (learnt as usize) < self.size {
            format!("; {} were asked for, but the texts have no more", self.size)
        } else {
            String::new()
        };
        println!("{learnt} tokens in {}{few}", self.out.display());
        Ok(())
    }
}

/// Encode texts as a file of tokens, to train a GPT on
#[derive(Debug, Args)]
pub(super) struct TokensArgs {
    /// Texts; several in one file are separated by <|endoftext|>
    #[arg(value_name = "TEXT", required = true)]
    texts: Vec<PathBuf>,
    /// File to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Tokenizer: bytes, a tokenizer.json, or a folder with one or with GPT-2's vocab.json and merges.txt
    #[arg(long, value_name = "NAME", default_value = "bytes")]
    tokenizer: PathBuf,
}

impl TokensArgs {
    pub(super) fn write(&self) -> anyhow::Result<()> {
        let tokenizer = GptTokenizer::open(&self.tokenizer)?;
        // Ctrl-C is checked after each text, so that the incomplete file is removed. A second Ctrl-C, or another
        // signal, ends the process at once.
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

/// A progress bar, hidden unless stderr is a terminal.
fn bar(bytes: u64) -> ProgressBar {
    let style = "{bar:24} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
    let style = ProgressStyle::with_template(style).expect("the template is right");
    ProgressBar::new(bytes).with_style(style.progress_chars("━━─"))
}
