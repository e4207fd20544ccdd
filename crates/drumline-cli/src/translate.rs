//! `drumline translate`: it starts `drumline-train translate`, as `drumline run` starts any program.
//!
//! The flags are listed here only for their help; drumline-train interprets them.

use std::ffi::OsString;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::errors::Mistake;
use crate::sbatch::{RunLine, typed};
use crate::train::{DEVICES, ReadyProgram, start};

const EXAMPLES: &str = "\
Examples:
  drumline translate --model exp/nmt --source test.src --out test.txt                   one rank, the best checkpoint
  drumline translate --nproc-per-node 4 --model exp/nmt/save --source test.src --out test.txt --reference test.tgt
  drumline translate --nproc-per-node 2 --model save/best save/best-2 --source test.src --out test.txt   an ensemble
  drumline translate --model best.safetensors --config config/nmt.yaml --source test.src --out test.txt --beam-size 8 --alpha 0.6

Ranks take batches as soon as they are free, so that none idles; lines are written in the order of the source. NJUNMT's names are \
accepted too: --model_path, --source_path, --saveto, --config_path, --beam_size, … The launcher's flags are those of drumline run.";

const TRANSLATING: &str = "Translating";

/// Translate a text file with a trained model: one rank, several on this node, or a whole cluster
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TranslateArgs {
    #[command(flatten)]
    flags: HandedOn,
    #[command(flatten)]
    run: RunLine,
}

/// `drumline-train translate`'s flags, as far as this program must know them.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = TRANSLATING)]
struct Flags {
    /// Weights: a folder of checkpoints (its best is used) or the run's folder above it, a checkpoint, or a .safetensors file; several are an ensemble
    #[arg(long, aliases = ["model_path", "model-path"], value_name = "PATH", required = true, num_args = 1..)]
    model: Vec<OsString>,
    /// Text to translate, a sentence a line
    #[arg(long, aliases = ["source_path", "source-path"], value_name = "FILE", required = true)]
    source: Option<OsString>,
    /// Where translations are written; FILE.0, FILE.1, … if several are kept for each line
    #[arg(long, aliases = ["saveto"], value_name = "FILE", required = true)]
    out: Option<OsString>,
    /// The training's configuration [default: config.yaml beside the checkpoints]
    #[arg(long, aliases = ["config_path", "config-path", "cfg"], value_name = "FILE")]
    config: Option<OsString>,
    /// Translations to compare with, for BLEU
    #[arg(long, value_name = "FILE")]
    reference: Option<OsString>,
    /// Partial translations kept for each sentence [default: 5]
    #[arg(long, aliases = ["beam_size"], value_name = "N")]
    beam_size: Option<usize>,
    /// Length penalty; 0 or less: none, scores are divided by the length [default: -1]
    #[arg(long, allow_hyphen_values = true, value_name = "A")]
    alpha: Option<f64>,
    /// Translations returned for each sentence [default: 1]
    #[arg(long, aliases = ["keep_n"], value_name = "N")]
    keep_n: Option<usize>,
    /// Longest translation [default: 150]
    #[arg(long, aliases = ["max_steps"], value_name = "N")]
    max_steps: Option<usize>,
    /// Size of a batch [default: 1024]
    #[arg(long, aliases = ["batch_size"], value_name = "N")]
    batch_size: Option<usize>,
    /// What the size of a batch counts: tokens or samples [default: tokens]
    #[arg(long, aliases = ["batching_key"], value_name = "KEY", value_parser = ["tokens", "samples"], hide_possible_values = true)]
    batching_key: Option<String>,
    /// Join word pieces, and put spaces and capitals as people write
    #[arg(long)]
    postprocess: bool,
    /// Gather translations through files in this folder, which all ranks can access [default: through messages]
    #[arg(long, aliases = ["shared_dir"], value_name = "DIR")]
    shared_dir: Option<OsString>,
    /// Where to compute: auto, cpu or cuda [default: run_configs.device]
    #[arg(long, value_name = "DEVICE", value_parser = DEVICES, hide_possible_values = true)]
    device: Option<String>,
    /// Flags of NJUNMT's launcher and command lines; not needed
    #[arg(long = "multi_gpu", alias = "multi-gpu", hide = true)]
    multi_gpu: bool,
    #[arg(long = "model_name", alias = "model-name", hide = true)]
    model_name: Option<OsString>,
    /// The same as --device cuda
    #[arg(long = "use_gpu", alias = "use-gpu")]
    use_gpu: bool,
}

/// The flags that were typed, in their full spelling.
#[derive(Debug)]
struct HandedOn(Vec<OsString>);

impl FromArgMatches for HandedOn {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let command = Flags::augment_args(Command::new("translate"));
        Ok(Self(command.get_arguments().flat_map(|arg| typed(arg, matches)).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for HandedOn {
    fn augment_args(command: Command) -> Command {
        Flags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Flags::augment_args_for_update(command)
    }
}

/// `run`'s flags on a command that takes no further arguments.
pub(crate) fn without_program(command: Command) -> Command {
    let command = command.mut_args(|arg| match arg.get_id().as_str() {
        "command" => arg.required(false).hide(true),
        "module" | "no_python" | "run_path" => arg.hide(true),
        _ => crate::run::hidden_if_without_effect(arg),
    });
    crate::run::as_torchrun(command)
}

/// Runs `drumline translate`; an error if a rank failed.
pub(crate) fn translate(args: TranslateArgs) -> anyhow::Result<()> {
    let TranslateArgs { flags, run } = args;
    if let Some(word) = run.program.first() {
        let word = word.to_string_lossy();
        return Err(Mistake::new(format!("`{word}` belongs to no flag; try --source {word}")).into());
    }
    start(&ReadyProgram { name: "translate", flags: flags.0, pairs: Vec::new() }, run)
}
