//! `drumline launch`: `run` for programs written for `torch.distributed.launch`, which get their local rank as an argument.

use clap::ValueEnum;
use drumline_launch::LocalRankArg;

use crate::run::{RunArgs, run};

const EXAMPLES: &str = "\
Examples:
  drumline launch --nproc-per-node 4 train.py --lr 0.1       train.py --local-rank=N --lr 0.1
  drumline launch --nproc-per-node 4 --use-env train.py      train.py, with LOCAL_RANK only
  drumline launch --rank-spelling underscore train.py        train.py --local_rank=N, whatever the script declares

All other flags are those of drumline run.";

/// Start ranks that get their local rank as an argument: takes torch.distributed.launch's command lines
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LaunchArgs {
    /// Pass no --local-rank: the program reads LOCAL_RANK
    #[arg(long)]
    use_env: bool,
    /// Spelling of the argument: --local-rank as since PyTorch 2, or --local_rank as before [default: the one that the script declares, or dash]
    #[arg(long, value_enum, value_name = "HOW")]
    rank_spelling: Option<Spelling>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Spelling {
    Dash,
    Underscore,
}

impl From<Spelling> for LocalRankArg {
    fn from(spelling: Spelling) -> Self {
        match spelling {
            Spelling::Dash => Self::Dash,
            Spelling::Underscore => Self::Underscore,
        }
    }
}

/// Runs `drumline launch`; an error if a rank failed.
pub(crate) fn launch(args: &LaunchArgs) -> anyhow::Result<()> {
    let spelling = || match args.rank_spelling {
        Some(given) => given.into(),
        None => args.run.declared_local_rank().unwrap_or(LocalRankArg::Dash),
    };
    run(&args.run, (!args.use_env).then(spelling))
}
