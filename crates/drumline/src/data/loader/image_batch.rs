//! A batch of images.

use drumline_torch::TorchError;
use drumline_torch::cuda::pinned;
use tch::{Device, Tensor};

/// Images with their classes.
#[derive(Debug)]
pub struct ImageBatch {
    /// The images as f32: sample, channel, row, column.
    pub images: Tensor,
    /// The class of each image, as i64.
    pub labels: Tensor,
    /// The index of each image in the data set.
    pub indices: Vec<usize>,
}

impl ImageBatch {
    /// Makes a batch of single images: their indices, pixels (channel, row, column; all of one size) and classes.
    pub fn stack(items: Vec<(usize, Tensor, i64)>) -> Result<Self, TorchError> {
        let (mut indices, mut images, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        for (index, image, label) in items {
            indices.push(index);
            images.push(image);
            labels.push(label);
        }
        Ok(Self { images: Tensor::f_stack(&images, 0)?, labels: Tensor::f_from_slice(&labels)?, indices })
    }

    /// The number of images.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Copies the batch to pinned memory.
    pub fn pin_memory(self) -> Result<Self, TorchError> {
        Ok(Self { images: pinned(&self.images)?, labels: pinned(&self.labels)?, ..self })
    }

    /// Copies the batch to a device. From pinned memory it does not wait for the end of the copy.
    pub fn to_device(&self, device: Device) -> Result<Self, TorchError> {
        // A copy from a GPU to the host must be complete when this returns.
        let is_async = device != Device::Cpu;
        let copy = |tensor: &Tensor| tensor.f_to_device_(device, tensor.kind(), is_async, false);
        Ok(Self { images: copy(&self.images)?, labels: copy(&self.labels)?, indices: self.indices.clone() })
    }
}
