//! Models: they compute an output for a batch.

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
}

impl<M: ModuleT + ?Sized, B: Supervised> Model<B> for M {
    type Output = Tensor;

    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<Tensor, Cause> {
        Ok(self.forward_t(batch.input(), mode == Mode::Train))
    }
}
