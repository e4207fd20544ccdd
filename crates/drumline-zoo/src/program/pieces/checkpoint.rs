//! The state of a run, to and from `OUT_DIR/checkpoints`.

use anyhow::Context;
use drumline::SamplerPosition;
use drumline::checkpoint::{Checkpoints, RngState, TrainState, check_optimizer, named, restore};
use drumline_torch::{Optimizer, Sgd};
use tch::nn::VarStore;

use crate::config::Config;
use crate::program::trainer::Position;

/// The run's checkpoints.
pub(in crate::program) fn checkpoints(config: &Config) -> Checkpoints {
    Checkpoints::new(config.run.out_dir.join("checkpoints"))
}

/// What is saved of a run at `at`.
pub(in crate::program) fn state(
    store: &VarStore,
    optimizer: &Sgd,
    at: &Position,
    config: serde_json::Value,
) -> anyhow::Result<TrainState> {
    Ok(TrainState {
        optimizer: optimizer.state(),
        epoch: at.epoch,
        step: at.step,
        sampler: serde_json::to_value(at.sampler)?,
        best: Some(at.best),
        config,
        rng: RngState::capture()?,
        ..TrainState::new(named(store))?
    })
}

/// A state that a run goes on from.
pub(in crate::program) struct Resumed {
    state: TrainState,
    pub(in crate::program) at: Position,
}

impl Resumed {
    pub(in crate::program) fn new(state: TrainState) -> anyhow::Result<Self> {
        let sampler: SamplerPosition =
            serde_json::from_value(state.sampler.clone()).context("the checkpoint's sampler position")?;
        let (epoch, step, best) = (state.epoch, state.step, state.best.unwrap_or(0.0));
        let at = Position { epoch, in_epoch: 0, step, saved: Some(step), best, sampler };
        Ok(Self { state, at })
    }

    /// Puts the weights into the model, and the rest into the optimizer if it is given.
    pub(in crate::program) fn restore(
        &self,
        store: &VarStore,
        optimizer: Option<&mut Sgd>,
    ) -> anyhow::Result<()> {
        restore(&named(store), &self.state.model)?;
        if let Some(optimizer) = optimizer {
            check_optimizer(&self.state.optimizer, "sgd")?;
            optimizer.load_state(&self.state.optimizer)?;
            self.state.rng.restore()?;
        }
        Ok(())
    }
}
