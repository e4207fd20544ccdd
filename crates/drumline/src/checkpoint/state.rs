//! What is saved: the whole state of a run at one step.

use std::num::NonZeroUsize;

use drumline_torch::{Named, OptimizerState, RngState, TorchError};
use serde_json::Value;

/// All that a run needs to go on. Every rank gives its own; what is the same on all ranks is written once.
#[derive(Debug, Clone)]
pub struct TrainState {
    /// Parameters and buffers, under PyTorch's names. Rank 0's are written.
    pub model: Vec<Named>,
    /// The parameters that are trained on, where `model` has others in their places, such as averages over steps. Rank 0's are written.
    pub trained: Vec<Named>,
    /// The optimizer's own state. Rank 0's is written.
    pub optimizer: OptimizerState,
    /// Epochs done.
    pub epoch: u64,
    /// Steps done; the checkpoint is named after it.
    pub step: u64,
    /// Where the sampler is in its epoch, the same on all ranks.
    pub sampler: Value,
    /// What the schedule keeps, if anything.
    pub schedule: Value,
    /// What the gradient scaler keeps, if there is one.
    pub scaler: Value,
    /// The best metric so far.
    pub best: Option<f64>,
    /// What an evaluation of this very state has found, if there was one.
    pub score: Option<Score>,
    /// The loss of the last step, if there was one. A checkpoint whose loss is not finite never replaces the last one whose loss was.
    pub loss: Option<f64>,
    /// The run's configuration.
    pub config: Value,
    /// This rank's random number generators.
    pub rng: RngState,
}

impl TrainState {
    /// A run that has not begun: no optimizer yet, the generators as they are now.
    pub fn new(model: Vec<Named>) -> Result<Self, TorchError> {
        Ok(Self {
            model,
            trained: Vec::new(),
            optimizer: OptimizerState::default(),
            epoch: 0,
            step: 0,
            sampler: Value::Null,
            schedule: Value::Null,
            scaler: Value::Null,
            best: None,
            score: None,
            loss: None,
            config: Value::Null,
            rng: RngState::capture()?,
        })
    }
}

/// Whether a checkpoint, of which the score and the best metric of its run are known, is the best of the run whose last checkpoint
/// knows this best metric: one that a run before has left in the folder is not.
pub(super) fn is_best_of((score, best): (Option<f64>, Option<f64>), last: Option<f64>) -> bool {
    last.is_some() && (score == last || best == last)
}

impl TrainState {
    /// Whether this, of the checkpoint that is called the best, is of the run that `last` is the last checkpoint of.
    pub fn is_best_of(&self, last: &Self) -> bool {
        is_best_of((self.score.map(|score| score.value), self.best), last.best)
    }
}

/// A metric of one state, by which states are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// The metric.
    pub value: f64,
    /// As with a loss; an accuracy is better when it is larger.
    pub smaller_is_better: bool,
}

impl Score {
    /// Where it comes among others: the largest is the best.
    pub(super) fn height(self) -> f64 {
        if self.smaller_is_better { -self.value } else { self.value }
    }
}

/// What a new checkpoint is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The latest.
    Latest,
    /// The latest, and the best so far: the same as place 1.
    Best,
    /// The latest, and at this place among the best so far; those from there on move back by one.
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
