//! How a model is cut and trained, and what a step takes and returns.

use drumline_plan::pipeline::StageMap;
use drumline_torch::{LossScaler, Masks, StepSamples};
use tch::{Device, Kind};

use super::build::FirstValues;
use super::layer::Boundary;
use super::plan::Order;
use crate::engine::{EngineOptions, Part};
use crate::error::ParallelError;

/// How a model is cut and trained.
pub struct PipelineOptions {
    /// In which order ranks do what.
    pub order: Order,
    /// The ranks for which the order is made: by default those along `pp`. If a single rank has all stages, it may be any
    /// number, and the rank does the work of all.
    pub ranks: Option<usize>,
    /// The micro-batches of a usual step, for which the program is verified at once.
    pub micro_batches: usize,
    /// The cost of each layer; by default the costs in the list.
    pub costs: Option<Vec<f64>>,
    /// Where the stages are: one device for all of them, or one for each rank of the order. By default the CPU, or where
    /// the variables are that they are built among.
    pub devices: Vec<Device>,
    /// Where first values are drawn from.
    pub first_values: FirstValues,
    /// Where dropout is drawn from: so it does not depend on the schedule.
    pub masks: Option<Masks>,
    /// The type of autocast in forwards.
    pub autocast: Option<Kind>,
    /// After the layers are built, this rank's variables that are parts of the model's: for layers that are cut along `tp`,
    /// [`TensorParallel::parts`](crate::tensor::TensorParallel::parts).
    pub parts: Box<dyn Fn() -> Vec<Part>>,
    /// What ranks do that have the same stages.
    pub within: Box<dyn EngineOptions>,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self {
            order: Order::default(),
            ranks: None,
            micro_batches: 1,
            costs: None,
            devices: Vec::new(),
            first_values: FirstValues::default(),
            masks: None,
            autocast: None,
            parts: Box::new(Vec::new),
            within: Default::default(),
        }
    }
}

impl std::fmt::Debug for PipelineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            order,
            ranks,
            micro_batches,
            costs,
            devices,
            first_values,
            masks,
            autocast,
            parts: _,
            within: _,
        } = self;
        f.debug_struct("PipelineOptions")
            .field("order", order)
            .field("ranks", ranks)
            .field("micro_batches", micro_batches)
            .field("costs", costs)
            .field("devices", devices)
            .field("first_values", first_values)
            .field("masks", masks)
            .field("autocast", autocast)
            .finish_non_exhaustive()
    }
}

/// A micro-batch. Ranks without the first stage need no inputs, and ranks without the last one no targets. The count of a
/// step that ranks agree on is that of the ranks with the first stage.
#[derive(Debug)]
pub struct MicroBatch {
    /// What the first layer gets.
    pub inputs: Boundary,
    /// What the loss gets beside the outputs.
    pub targets: Boundary,
    /// Which samples of the step these are.
    pub samples: StepSamples,
}

impl MicroBatch {
    /// A micro-batch whose samples are `first`, `first + 1`, ….
    pub fn new(inputs: Boundary, targets: Boundary, first: u64) -> Self {
        let tensor = inputs.first().or(targets.first());
        let count = tensor.and_then(|tensor| tensor.size().first().copied()).unwrap_or(0) as u64;
        Self { inputs, targets, samples: StepSamples { first, stride: 1, count } }
    }

    /// A micro-batch on a rank that has neither the first nor the last stage.
    pub fn elsewhere() -> Self {
        let samples = StepSamples { first: 0, stride: 1, count: 0 };
        Self { inputs: Vec::new(), targets: Vec::new(), samples }
    }
}

/// How losses are scaled before backward.
#[derive(Debug, Clone, Copy, Default)]
pub enum Scale<'a> {
    /// They are not.
    #[default]
    No,
    /// By this scaler; [`Engine::unscale`](crate::Engine::unscale) divides by it.
    By(&'a LossScaler),
}

/// The loss of a step, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLoss {
    /// The sum over all micro-batches of all ranks.
    pub sum: f64,
    /// What it is divided by.
    pub count: f64,
}

impl StepLoss {
    /// The mean.
    pub fn mean(self) -> f64 {
        self.sum / self.count
    }
}

impl PipelineOptions {
    /// The device of a stage; `usual` if none is given.
    pub(super) fn device_of(
        &self,
        stage: usize,
        map: &StageMap,
        usual: Device,
    ) -> Result<Device, ParallelError> {
        match &self.devices[..] {
            [] => Ok(usual),
            [one] => Ok(*one),
            each if each.len() == map.num_ranks() => Ok(each[map.rank_of(stage)]),
            other => {
                let expected = format!("1 for all, or {}, one for each rank of the order", map.num_ranks());
                Err(ParallelError::value("the number of devices", other.len(), expected))
            }
        }
    }
}
