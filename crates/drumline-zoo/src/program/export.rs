//! `drumline-train export`: writes a trained GPT as a Hugging Face folder.

use std::fs;
use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;

use crate::gpt::Found;

const EXAMPLES: &str = "\
Examples:
  drumline export --from exp/gpt2 --out gpt2-mine
  drumline generate --from gpt2-mine \"Once\"
  python -c \"import transformers; transformers.AutoModelForCausalLM.from_pretrained('gpt2-mine')\"

The folder gets model.safetensors (f32, Hugging Face's names, one row for each token of the vocabulary), config.json, and tokenizer.json unless \
tokens are bytes.";

/// Export a trained GPT as a Hugging Face folder
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExportArgs {
    /// A run's OUT_DIR (its best checkpoint is used, or the last if nothing was evaluated), or a Hugging Face folder
    #[arg(long, value_name = "RUN")]
    from: PathBuf,
    /// Folder to create
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Writes the folder and prints a summary.
pub(super) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let found = Found::in_folder(&args.from)?;
    let is_empty = fs::read_dir(&args.out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_empty, "--out {} has files already; try a new folder", args.out.display());
    found.export(&args.out)?;
    println!("{} tokens, {}, in {}", found.options.vocab_size, found.weights.display(), args.out.display());
    Ok(())
}
