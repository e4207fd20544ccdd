//! What can be trained: something that makes an output of a batch.

use tch::Tensor;
use tch::nn::ModuleT;

use super::batch::Supervised;
use crate::loader::Cause;

/// What a forward is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Gradients follow: dropout drops, norms learn.
    Train,
    /// No gradients.
    Eval,
}

/// A model on batches of type `B`. Every `tch` module is one, on batches of one input and one target.
///
/// ```
/// use drumline::Cause;
/// use drumline::tch::{Tensor, nn, nn::Module};
/// use drumline::trainer::{Mode, Model};
/// # use drumline::{TorchError, tch::Device, trainer::Batch};
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
    /// What the loss and the metrics get.
    type Output;

    /// The output for a batch that is on the model's device. Where steps are made as CUDA graphs it is not called in each of them: see
    /// [`DistTrainer::cuda_graphs`](super::DistTrainer::cuda_graphs).
    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<Self::Output, Cause>;
}

impl<M: ModuleT + ?Sized, B: Supervised> Model<B> for M {
    type Output = Tensor;

    fn forward_batch(&self, batch: &B, mode: Mode) -> Result<Tensor, Cause> {
        Ok(self.forward_t(batch.input(), mode == Mode::Train))
    }
}
