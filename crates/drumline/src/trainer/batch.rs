//! What the trainer needs of a batch: the number of samples, and a copy to a device.

use drumline_torch::TorchError;
use tch::{Device, Tensor};

use crate::data::loader::ImageBatch;

/// A batch of samples, in any number of tensors.
///
/// ```
/// use drumline::torch::TorchError;
/// use drumline::tch::{Device, Tensor};
/// use drumline::trainer::Batch;
///
/// /// Sentences and their translations, padded to the same length.
/// struct Pairs {
///     source: Tensor,
///     target: Tensor,
/// }
///
/// impl Batch for Pairs {
///     fn num_samples(&self) -> usize {
///         self.source.size()[0] as usize
///     }
///     fn to_device(self, device: Device) -> Result<Self, TorchError> {
///         Ok(Self { source: self.source.f_to_device(device)?, target: self.target.f_to_device(device)? })
///     }
/// }
/// ```
pub trait Batch: Send + Sized + 'static {
    /// The number of samples.
    fn num_samples(&self) -> usize;

    /// Copies the batch to the model's device.
    fn to_device(self, device: Device) -> Result<Self, TorchError>;

    /// All tensors that the model and the loss read, always in the same order. A step that is recorded as a CUDA graph
    /// gets new batches by copies into them. The default, `None`, means that steps stay eager.
    fn tensors(&self) -> Option<Vec<&Tensor>> {
        None
    }
}

/// A batch with one input tensor and one target tensor. Any `tch` module can be trained on it, with
/// [`CrossEntropy`](super::CrossEntropy) and any [`Metric`](crate::metrics::Metric).
pub trait Supervised: Batch {
    /// The model's input.
    fn input(&self) -> &Tensor;

    /// The correct output.
    fn target(&self) -> &Tensor;
}

impl Batch for ImageBatch {
    fn num_samples(&self) -> usize {
        self.len()
    }

    fn to_device(self, device: Device) -> Result<Self, TorchError> {
        let is_there = self.images.device() == device && self.labels.device() == device;
        if is_there { Ok(self) } else { ImageBatch::to_device(&self, device) }
    }

    fn tensors(&self) -> Option<Vec<&Tensor>> {
        Some(vec![&self.images, &self.labels])
    }
}

impl Supervised for ImageBatch {
    fn input(&self) -> &Tensor {
        &self.images
    }

    fn target(&self) -> &Tensor {
        &self.labels
    }
}

/// Input and target; the first dimension of the input counts the samples.
impl Batch for (Tensor, Tensor) {
    fn num_samples(&self) -> usize {
        self.0.size().first().map_or(0, |samples| *samples as usize)
    }

    fn to_device(self, device: Device) -> Result<Self, TorchError> {
        Ok((self.0.f_to_device(device)?, self.1.f_to_device(device)?))
    }

    fn tensors(&self) -> Option<Vec<&Tensor>> {
        Some(vec![&self.0, &self.1])
    }
}

impl Supervised for (Tensor, Tensor) {
    fn input(&self) -> &Tensor {
        &self.0
    }

    fn target(&self) -> &Tensor {
        &self.1
    }
}
