//! Models: they compute an output for a batch.

use std::rc::Rc;

use drumline_parallel::pipeline::Stages;
use tch::Tensor;
use tch::nn::ModuleT;

use super::batch::Supervised;
use crate::data::loader::Cause;

/// The purpose of a forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Training: dropout is active, and norms update their statistics.
    Train,
    /// Evaluation, without gradients.
    Eval,
}

/// A model for batches of type `B`. Every `tch` module is one, for batches with one input and one target.
///
/// ```
/// use drumline::data::Cause;
/// use drumline::tch::{Tensor, nn, nn::Module};
/// use drumline::trainer::{Mode, Model};
/// # use drumline::tch::Device;
/// # use drumline::torch::TorchError;
/// # use drumline::trainer::Batch;
/// # struct Pairs { source: Tensor, target: Tensor }
/// # impl Batch for Pairs {
/// #     fn num_samples(&self) -> usize { 0 }
/// #     fn to_device(self, _: Device) -> Result<Self, TorchError> { Ok(self) }
/// # }
///
/// /// Two inputs, one output.
/// struct Translator {
///     encoder: nn::Embedding,
///     decoder: nn::Embedding,
/// }
///
/// impl Model<Pairs> for Translator {
///     type Output = Tensor;
///
///     fn forward_batch(&self, batch: &Pairs, _mode: Mode) -> Result<Tensor, Cause> {
///         Ok(self.encoder.forward(&batch.source) + self.decoder.forward(&batch.target))
///     }
/// }
/// ```
pub trait Model<B> {
    /// The input of the loss and the metrics.
    type Output;

    /// The output for a batch on the model's device. If steps are CUDA graphs, it is not called in each step: see
    /// [`DistTrainer::cuda_graphs`](super::DistTrainer::cuda_graphs).
    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<Self::Output, Cause>;

    /// The model as stages, of which this rank has some, if it is cut by its layers. Then steps and evaluations are those of a
    /// pipeline, and [`forward_batch`](Self::forward_batch) is not called.
    fn staged(&self) -> Option<&dyn Staged<B, Output = Self::Output>> {
        None
    }
}

/// A model that is cut by its layers. Its micro-batches are the batches of a step
/// ([`DistTrainer::update_every`](super::DistTrainer::update_every)).
pub trait Staged<B> {
    /// The input of the loss and the metrics.
    type Output;

    /// What this rank has of the model.
    fn stages(&self) -> &Rc<Stages>;

    /// What the first layer gets of a batch.
    fn inputs(&self, batch: &B) -> Result<Vec<Tensor>, Cause>;

    /// The output, of what the last layer returns for a batch.
    fn output(&self, outputs: &[Tensor], batch: &B) -> Result<Self::Output, Cause>;
}

impl<M: ModuleT + ?Sized, B: Supervised> Model<B> for M {
    type Output = Tensor;

    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<Tensor, Cause> {
        Ok(self.forward_t(batch.input(), mode == Mode::Train))
    }
}

/// Stages as a model for batches with one input and one target: the first layer gets the input, and the output is the first
/// tensor that the last layer returns.
#[derive(Debug, Clone)]
pub struct StagedModel(pub Rc<Stages>);

impl<B: Supervised> Model<B> for StagedModel {
    type Output = Tensor;

    fn forward_batch(&self, _: &B, _: Mode) -> Result<Tensor, Cause> {
        Err("this rank has only some stages of the model; try a pipeline's step or evaluation".into())
    }

    fn staged(&self) -> Option<&dyn Staged<B, Output = Tensor>> {
        Some(self)
    }
}

impl<B: Supervised> Staged<B> for StagedModel {
    type Output = Tensor;

    fn stages(&self) -> &Rc<Stages> {
        &self.0
    }

    fn inputs(&self, batch: &B) -> Result<Vec<Tensor>, Cause> {
        Ok(vec![batch.input().shallow_clone()])
    }

    fn output(&self, outputs: &[Tensor], _: &B) -> Result<Tensor, Cause> {
        let first = outputs.first().ok_or("the last layer returned no tensor")?;
        Ok(first.shallow_clone())
    }
}
