//! A batch of images.

use drumline_torch::TorchError;
use drumline_torch::cuda::pinned;
use tch::{Device, Tensor};

/// Images with their classes.
#[derive(Debug)]
pub struct ImageBatch {
    /// The images, f32: sample, channel, row, column.
    pub images: Tensor,
    /// The class of each, i64.
    pub labels: Tensor,
    /// The place of each in the data set.
    pub indices: Vec<usize>,
}

impl ImageBatch {
    /// Makes a batch of single images: their places, pixels (channel, row, column; all of one size) and classes.
    pub fn stack(items: Vec<(usize, Tensor, i64)>) -> Result<Self, TorchError> {
        let images: Vec<_> = items.iter().map(|(_, image, _)| image).collect();
        let labels: Vec<_> = items.iter().map(|(_, _, label)| *label).collect();
        let images = Tensor::f_stack(&images, 0)?;
        Ok(Self {
            images,
            labels: Tensor::f_from_slice(&labels)?,
            indices: items.iter().map(|(index, ..)| *index).collect(),
        })
    }

    /// How many images.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// Copies it to pinned memory.
    pub fn pin_memory(self) -> Result<Self, TorchError> {
        Ok(Self { images: pinned(&self.images)?, labels: pinned(&self.labels)?, ..self })
    }

    /// Copies it to a device; from pinned memory without waiting for the copy's end.
    pub fn to_device(&self, device: Device) -> Result<Self, TorchError> {
        // What comes from a GPU is there when this returns.
        let is_async = device != Device::Cpu;
        let copy = |tensor: &Tensor| tensor.f_to_device_(device, tensor.kind(), is_async, false);
        Ok(Self { images: copy(&self.images)?, labels: copy(&self.labels)?, indices: self.indices.clone() })
    }
}
