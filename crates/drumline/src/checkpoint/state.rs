//! `RunState`: the whole state of a run at one step, for a checkpoint.

use std::num::NonZeroUsize;

use drumline_comm::MeshShape;
use drumline_torch::{Named, OptimizerState, RngState, TorchError};
use serde_json::Value;

use super::layout::StateLayout;

/// Everything that a run needs to resume. Every rank passes its own; what is the same on all ranks is written once.
///
/// It is data for a checkpoint. The live state of a training, which callbacks see, is
/// [`trainer::TrainState`](crate::trainer::TrainState).
#[derive(Debug, Clone)]
pub struct RunState {
    /// Parameters and buffers, under PyTorch's names. Those of rank 0 are written.
    pub model: Vec<Named>,
    /// The trained parameters, if `model` has others instead, such as averages over steps. Those of rank 0 are written.
    pub trained: Vec<Named>,
    /// The optimizer's state. That of rank 0 is written.
    pub optimizer: OptimizerState,
    /// How the ranks divide the tensors among them: `model`, `trained` and `optimizer` then have the parts that this rank
    /// holds, and each rank writes its own. `None` if rank 0 has all of them, and writes them.
    pub layout: Option<StateLayout>,
    /// The mesh of the ranks; `None` for replicas, all along `dp`.
    pub mesh: Option<MeshShape>,
    /// Epochs done.
    pub epoch: u64,
    /// Steps done; the checkpoint is named after it.
    pub step: u64,
    /// The sampler's position in its epoch, the same on all ranks.
    pub sampler: Value,
    /// State of the schedule, for a program with its own loop.
    pub schedule: Value,
    /// State of a [`DistTrainer`](crate::trainer::DistTrainer).
    pub trainer: Value,
    /// State of an [`Accelerator`](crate::accelerator::Accelerator).
    pub accelerator: Value,
    /// State of the gradient scaler, if there is one.
    pub scaler: Value,
    /// The best metric so far.
    pub best: Option<f64>,
    /// The result of an evaluation of this state, if there was one.
    pub score: Option<Score>,
    /// The loss of the last step, if there was one. A checkpoint whose loss is not finite never replaces the last one
    /// whose loss was.
    pub loss: Option<f64>,
    /// The run's configuration.
    pub config: Value,
    /// This rank's random number generators.
    pub rng: RngState,
}

impl RunState {
    /// The state of a run that has not begun: no optimizer yet, and the current random number generators.
    pub fn new(model: Vec<Named>) -> Result<Self, TorchError> {
        Ok(Self { model, ..Self::without_tensors(RngState::capture()?) })
    }

    /// The state of a run that has not begun, without its model.
    pub(super) fn without_tensors(rng: RngState) -> Self {
        Self {
            model: Vec::new(),
            trained: Vec::new(),
            optimizer: OptimizerState::default(),
            layout: None,
            mesh: None,
            epoch: 0,
            step: 0,
            sampler: Value::Null,
            schedule: Value::Null,
            trainer: Value::Null,
            accelerator: Value::Null,
            scaler: Value::Null,
            best: None,
            score: None,
            loss: None,
            config: Value::Null,
            rng,
        }
    }
}

/// Whether a checkpoint with this score and best metric is the best of the run whose last checkpoint has the best
/// metric `last`. One that an earlier run has left in the folder is not.
pub(super) fn is_best_of(score: Option<f64>, best: Option<f64>, last: Option<f64>) -> bool {
    last.is_some() && (score == last || best == last)
}

impl RunState {
    /// Whether this state, of the checkpoint marked as the best, is from the run whose last checkpoint is `last`.
    pub fn is_best_of(&self, last: &Self) -> bool {
        is_best_of(self.score.map(|score| score.value), self.best, last.best)
    }
}

/// A metric of one state, by which states are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// The metric.
    pub value: f64,
    /// True for a loss, false for an accuracy.
    pub smaller_is_better: bool,
}

impl Score {
    /// The key by which scores are sorted: the largest is the best.
    pub(super) fn height(self) -> f64 {
        if self.smaller_is_better { -self.value } else { self.value }
    }
}

/// How a new checkpoint is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// As the latest.
    Latest,
    /// As the latest, and as the best so far: the same as place 1.
    Best,
    /// As the latest, and at this place among the best so far. Those after it move back by one.
    Place(NonZeroUsize),
}

impl Mark {
    /// The place among the best, if it has one.
    pub(super) fn place(self) -> Option<NonZeroUsize> {
        match self {
            Self::Latest => None,
            Self::Best => Some(NonZeroUsize::MIN),
            Self::Place(place) => Some(place),
        }
    }
}
