//! The state of a run, from `OUT_DIR/checkpoints`.

use drumline::checkpoint::{Checkpoints, Loaded, RngState};
use drumline_torch::Optimizer;
use tch::nn::VarStore;

use super::optimizer::sgd;
use crate::config::{Config, Run};

/// The run's checkpoints.
pub(in crate::program) fn checkpoints(run: &Run) -> Checkpoints {
    Checkpoints::new(run.out_dir.join("checkpoints"))
}

/// The checkpoint as `TRAIN.LOAD_OPT` wants it: with the optimizer's state and the random numbers, or with those of a run that begins.
pub(in crate::program) fn with_optimizer(
    mut found: Loaded,
    config: &Config,
    store: &VarStore,
) -> anyhow::Result<Loaded> {
    if !config.train.load_opt {
        found.state.optimizer = sgd(store, &config.optim)?.state();
        found.state.rng = RngState::capture()?;
    }
    Ok(found)
}
