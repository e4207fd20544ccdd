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
            config: Value::Null,
            rng: RngState::capture()?,
        })
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
