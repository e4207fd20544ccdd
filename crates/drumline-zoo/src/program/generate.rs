//! `drumline-train generate`: continues prompts with a trained GPT, and prints tokens as they are generated.

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use drumline_text::{GptTokenizer, SamplingOptions, TextStream, TokenSampler};
use drumline_torch::flush_denormals;
use tch::nn::VarStore;

use super::args::device_kind;
use crate::config::DeviceKind;
use crate::driver::device;
use crate::gpt::{Caching, Found, Generator};

const EXAMPLES: &str = "\
Examples:
  drumline generate --from exp/gpt-tiny \"Ada had a\"
  drumline generate --from exp/gpt-tiny --greedy \"Tom had\" \"Mia had\"
  drumline generate --from exp/gpt2 --temperature 0.8 --top-k 40 --top-p 0.95 --seed 7 --max-tokens 200 \"Once\"
  drumline generate --from ~/gpt2 \"Once\"     a Hugging Face folder: config.json, model.safetensors, tokenizer.json

Text goes to stdout, prompt and continuation, as tokens come; how fast it went, and the seed, go to stderr.";

/// Continue texts with a trained GPT
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct GenerateArgs {
    /// A run's OUT_DIR (its best checkpoint is used), or a Hugging Face folder
    #[arg(long, value_name = "RUN")]
    from: PathBuf,
    /// Prompts to continue; without one, a new text is started
    #[arg(value_name = "PROMPT")]
    prompts: Vec<String>,
    /// Largest number of new tokens
    #[arg(long, value_name = "N", default_value_t = 200)]
    max_tokens: usize,
    /// Sampling temperature: above 1 more random, below 1 less
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Sample only from this many most probable tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample only from the most probable tokens whose probabilities add up to this
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Always choose the most probable token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    greedy: bool,
    /// Seed of the sampling [default: a new one each time]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Recompute everything for each token instead of caching: slow, for comparison
    #[arg(long)]
    no_cache: bool,
    /// Device to compute on: auto, cpu or cuda
    #[arg(long, default_value = "auto", value_name = "DEVICE", value_parser = device_kind)]
    device: DeviceKind,
}

impl GenerateArgs {
    fn sampling(&self, seed: u64) -> SamplingOptions {
        let temperature = if self.greedy { 0.0 } else { self.temperature };
        SamplingOptions { temperature, top_k: self.top_k, top_p: self.top_p, seed }
    }
}

/// Continues all prompts, one after the other.
pub(super) fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    flush_denormals(true)?;
    let seed = args.seed.unwrap_or_else(another_seed);
    TokenSampler::new(args.sampling(seed))?;
    let found = Found::in_folder(&args.from)?;
    let store = VarStore::new(device(args.device, 0)?);
    let model = found.net(&store)?;
    let generator = Generator {
        model: &model,
        end_of_text: found.tokenizer.end_of_text(),
        max_tokens: args.max_tokens,
        caching: if args.no_cache { Caching::Off } else { Caching::On },
    };
    let (begin, mut tokens) = (Instant::now(), 0);
    let no_prompt = [String::new()];
    let prompts = if args.prompts.is_empty() { &no_prompt[..] } else { &args.prompts };
    for (place, prompt) in prompts.iter().enumerate() {
        // Each prompt has a sampler and a seed of its own, so that its text does not depend on the other prompts.
        let mut sampler = TokenSampler::new(args.sampling(seed.wrapping_add(place as u64)))?;
        match shown(&generator, &found.tokenizer, prompt, &mut sampler) {
            Err(error) if is_reader_gone(&error) => return Ok(()),
            shown => tokens += shown?,
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let drawn = if args.greedy { String::new() } else { format!(", seed {seed}") };
    eprintln!("{tokens} tokens in {seconds:.1} s, {:.0} tokens/s{drawn}", tokens as f64 / seconds.max(1e-9));
    Ok(())
}

/// Whether the reader of stdout has closed it, which is not an error.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Small enough to be typed again.
fn another_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_micros()))
}

/// Prints a prompt and its continuation token by token, and returns the number of tokens.
fn shown(
    generator: &Generator<'_>,
    tokenizer: &GptTokenizer,
    prompt: &str,
    sampler: &mut TokenSampler,
) -> anyhow::Result<usize> {
    let mut out = std::io::stdout().lock();
    let mut say = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
    say(prompt)?;
    let (mut stream, mut tokens, mut failure) = (TextStream::new(tokenizer), 0, None);
    generator.generate(&tokenizer.encode(prompt)?, sampler, |token| {
        tokens += 1;
        let said = stream.push(token).map_err(anyhow::Error::from).and_then(|text| Ok(say(&text)?));
        failure = said.err();
        if failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(failure) = failure {
        return Err(failure.context("cannot write the text"));
    }
    say(&stream.finish()?)?;
    say("\n")?;
    Ok(tokens)
}
