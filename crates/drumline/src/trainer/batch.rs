//! What the trainer must know of a batch: how many samples, and how it gets to a device.

use drumline_torch::TorchError;
use tch::{Device, Tensor};

use crate::loader::ImageBatch;

/// A batch of samples. Of how many tensors it is made is its own business.
///
/// ```
/// use drumline::TorchError;
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
    /// How many samples.
    fn num_samples(&self) -> usize;

    /// Copies it to where the model is.
    fn to_device(self, device: Device) -> Result<Self, TorchError>;

    /// All that the model and the loss read of it, always in the same order: a step that has been recorded as a CUDA graph is fed by copying
    /// into them. `None`, if it is not said: then steps are not recorded.
    fn tensors(&self) -> Option<Vec<&Tensor>> {
        None
    }
}

/// A batch of one tensor that goes in and one that should come out. Any `tch` module can be trained on such, with
/// [`CrossEntropy`](super::CrossEntropy) and any [`Metric`](crate::Metric).
pub trait Supervised: Batch {
    /// What the model gets.
    fn input(&self) -> &Tensor;

    /// What it should make of it.
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
