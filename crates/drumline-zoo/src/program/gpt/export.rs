//! `drumline-train export`: a trained GPT in a folder as Hugging Face's.

use std::fs;
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use super::found::Found;

const EXAMPLES: &str = "\
Examples:
  drumline export --from exp/gpt2 --out gpt2-mine
  drumline generate --from gpt2-mine \"Once\"
  python -c \"import transformers; transformers.AutoModelForCausalLM.from_pretrained('gpt2-mine')\"

The folder gets model.safetensors (f32, Hugging Face's names, one row for each token of the vocabulary), config.json, and tokenizer.json unless \
tokens are bytes.";

/// Write a trained GPT as a folder of Hugging Face's
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::program) struct ExportArgs {
    /// A run's OUT_DIR, of which the best checkpoint is taken (the last where nothing was evaluated), or a folder of Hugging Face's
    #[arg(long, value_name = "RUN")]
    from: PathBuf,
    /// Folder to write to, which is made
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Writes the folder, and says what it has.
pub(in crate::program) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let found = Found::in_folder(&args.from)?;
    let is_empty = fs::read_dir(&args.out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_empty, "--out {} has files already; try a new folder", args.out.display());
    found.export(&args.out)?;
    println!("{} tokens, {}, in {}", found.options.vocab_size, found.weights.display(), args.out.display());
    Ok(())
}
