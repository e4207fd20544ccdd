//! How long a contest takes: options that all contests share.

use std::time::Duration;

/// The longest wait of a quick run for a quiet machine.
const QUICK_PATIENCE: u64 = 2;

/// `BLOCKS` is the default number of blocks.
#[derive(clap::Args, Debug)]
pub(crate) struct Pace<const BLOCKS: usize> {
    /// How often each takes its turn
    #[arg(long, aliases = ["turns", "rounds"], default_value_t = BLOCKS)]
    blocks: usize,
    /// Longest wait of a turn for a quiet machine, in seconds
    #[arg(long, default_value_t = 30)]
    patience: u64,
    /// One short block, to see that everything works; its figures are no result
    #[arg(long)]
    pub(crate) quick: bool,
}

impl<const BLOCKS: usize> Default for Pace<BLOCKS> {
    fn default() -> Self {
        Self { blocks: BLOCKS, patience: 30, quick: false }
    }
}

impl<const BLOCKS: usize> Pace<BLOCKS> {
    pub(crate) fn blocks(&self) -> usize {
        if self.quick { 1 } else { self.blocks }
    }

    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(if self.quick { self.patience.min(QUICK_PATIENCE) } else { self.patience })
    }

    /// What a run asks of each turn, or less in a quick run.
    pub(crate) fn at_most<T: PartialOrd>(&self, asked: T, quick: T) -> T {
        if self.quick && quick < asked { quick } else { asked }
    }

    /// The first line of a quick run's report.
    pub(crate) fn warning(&self) -> Option<String> {
        self.quick.then(|| "**quick run: shows that everything works; its figures are no result**".to_owned())
    }
}
