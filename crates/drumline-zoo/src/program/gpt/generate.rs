//! `drumline-train generate`: what a trained GPT makes of prompts, as it comes.

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use drumline_text::{GptTokenizer, SamplingOptions, TextStream, TokenSampler};
use drumline_torch::flush_denormals;
use tch::nn::VarStore;

use super::found::Found;
use crate::config::DeviceKind;
use crate::gpt::{Caching, Generator};
use crate::program::args::device_kind;
use crate::program::checked::device;

const EXAMPLES: &str = "\
Examples:
  drumline generate --from exp/gpt-tiny \"Ada had a\"
  drumline generate --from exp/gpt-tiny --greedy \"Tom had\" \"Mia had\"
  drumline generate --from exp/gpt2 --temperature 0.8 --top-k 40 --top-p 0.95 --seed 7 --max-tokens 200 \"Once\"
  drumline generate --from ~/gpt2 \"Once\"     a folder of Hugging Face's: config.json, model.safetensors, tokenizer.json

Text goes to stdout, prompt and continuation, as tokens come; how fast it went, and the seed, go to stderr.";

/// Continue texts with a trained GPT
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::program) struct GenerateArgs {
    /// A run's OUT_DIR (its best checkpoint is taken), or a folder of Hugging Face's
    #[arg(long, value_name = "RUN")]
    from: PathBuf,
    /// How texts begin; without one, a text begins anew
    #[arg(value_name = "PROMPT")]
    prompts: Vec<String>,
    /// The most tokens that are added
    #[arg(long, value_name = "N", default_value_t = 200)]
    max_tokens: usize,
    /// Above 1 the unlikely gets likelier, below 1 less likely
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temperature: f64,
    /// Draw only from so many of the likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw only from the likeliest tokens that have this probability together
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Always the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    greedy: bool,
    /// Decides what is drawn [default: another each time]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Compute everything anew for each token, without a cache: slow, for comparison
    #[arg(long)]
    no_cache: bool,
    /// What computes: auto, cpu or cuda
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
pub(in crate::program) fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
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
        caching: if args.no_cache { Caching::Anew } else { Caching::Kept },
    };
    let (begin, mut tokens) = (Instant::now(), 0);
    let no_prompt = [String::new()];
    let prompts = if args.prompts.is_empty() { &no_prompt[..] } else { &args.prompts };
    for (place, prompt) in prompts.iter().enumerate() {
        // What is drawn for a prompt does not depend on the others.
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

/// Whoever reads has had enough: no failure.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Small enough to be typed again.
fn another_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::from(now.subsec_micros()))
}

/// Writes a prompt and what follows as it comes, and says how many tokens came.
fn shown(
    generator: &Generator<'_>,
    tokenizer: &GptTokenizer,
    prompt: &str,
    sampler: &mut TokenSampler,
) -> anyhow::Result<usize> {
    let mut out = std::io::stdout().lock();
    let mut say = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
    say(prompt)?;
    let (mut stream, mut tokens, mut trouble) = (TextStream::new(tokenizer), 0, None);
    generator.generate(&tokenizer.encode(prompt)?, sampler, |token| {
        tokens += 1;
        let said = stream.push(token).map_err(anyhow::Error::from).and_then(|text| Ok(say(&text)?));
        trouble = said.err();
        if trouble.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(trouble) = trouble {
        return Err(trouble.context("cannot write the text"));
    }
    say(&stream.finish()?)?;
    say("\n")?;
    Ok(tokens)
}
