//! `drumline-train export`: writes a trained GPT as a Hugging Face folder, or a checkpoint of DeepSpeed as ours.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;
use drumline::checkpoint::deepspeed::DeepSpeedCheckpoint;

use crate::gpt::Found;

const EXAMPLES: &str = "\
Examples:
  drumline export --from exp/gpt2 --out gpt2-mine
  drumline generate --from gpt2-mine \"Once\"
  python -c \"import transformers; transformers.AutoModelForCausalLM.from_pretrained('gpt2-mine')\"
  drumline export --from-deepspeed out --out model.safetensors
  drumline export --from-deepspeed out --tag global_step100 --optimizer --out resumed

--from: the folder gets model.safetensors (f32, Hugging Face's names, one row for each token of the vocabulary), config.json, and \
tokenizer.json unless tokens are bytes.
--from-deepspeed: all tensors of the model with its names, numbers in f32, put together from the files of all ranks (ZeRO stages 0 to 3). \
The files are pickles; nothing that they name is run.";

/// Export a trained GPT as a Hugging Face folder, or a checkpoint of DeepSpeed as safetensors
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExportArgs {
    /// A run's OUT_DIR (its best checkpoint is used, or the last if nothing was evaluated), or a Hugging Face folder
    #[arg(long, value_name = "RUN", required_unless_present = "from_deepspeed")]
    from: Option<PathBuf>,
    /// A folder that DeepSpeed's save_checkpoint wrote
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    from_deepspeed: Option<PathBuf>,
    /// The save of DeepSpeed to export [default: that of the file `latest`]
    #[arg(long, requires = "from_deepspeed")]
    tag: Option<String>,
    /// Export the moments of Adam too: OUT becomes a folder of checkpoints from which a run resumes
    #[arg(long, requires = "from_deepspeed")]
    optimizer: bool,
    /// What to create: a folder; with --from-deepspeed a file [default: model.safetensors]
    #[arg(long, value_name = "OUT", required_unless_present = "from_deepspeed")]
    out: Option<PathBuf>,
}

/// Writes the files and prints a summary.
pub(super) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    if let Some(folder) = &args.from_deepspeed {
        return export_deepspeed(folder, args);
    }
    let (from, out) = args.from.as_ref().zip(args.out.as_ref()).context("--from and --out are needed")?;
    let found = Found::in_folder(from)?;
    ensure_new(out)?;
    found.export(out)?;
    println!("{} tokens, {}, in {}", found.options.vocab_size, found.weights.display(), out.display());
    Ok(())
}

fn export_deepspeed(folder: &Path, args: &ExportArgs) -> anyhow::Result<()> {
    let found = DeepSpeedCheckpoint::open(folder, args.tag.as_deref())?;
    let described = format!(
        "{} tensors of {}, stage {} of {} ranks",
        found.names().len(),
        found.tag(),
        found.stage(),
        found.num_ranks()
    );
    let default = if args.optimizer { "checkpoints" } else { "model.safetensors" };
    let out = args.out.clone().unwrap_or_else(|| default.into());
    if args.optimizer {
        ensure_new(&out)?;
        let saved = found.import(&out)?;
        println!("{described}, with the optimizer's state, in {}", saved.path.display());
    } else {
        found.export(&out)?;
        println!("{described}, in {}", out.display());
    }
    Ok(())
}

/// Returns an error if there is something in the folder.
fn ensure_new(out: &Path) -> anyhow::Result<()> {
    let is_empty = fs::read_dir(out).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_empty, "--out {} has files already; try a new folder", out.display());
    Ok(())
}
