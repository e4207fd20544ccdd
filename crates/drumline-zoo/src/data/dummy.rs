//! Random images, to measure training speed without reading files.

use super::assemble::{self, Cause, Paint};
use super::on_device::Stock;
use crate::transforms::{Layout, Painter, Pixels, Size, Transform};
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::torch::TorchError;

/// A dataset of any length that repeats a few random images. Labels cycle through the classes.
pub struct Dummy {
    len: usize,
    num_classes: i64,
    pool: Vec<u8>,
    transform: Transform,
}

/// The number of different images: enough for some variety in a batch, few enough to stay in the cache.
const POOL: usize = 16;

impl Dummy {
    /// Creates random images of the transform's output size.
    pub fn new(len: usize, num_classes: i64, transform: Transform) -> Self {
        let mut rng = Sample::new(0, 0, 0).rng();
        let words = (POOL * transform.elements()).div_ceil(8);
        let pool = (0..words).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        Self { len, num_classes, pool, transform }
    }

    /// The number of classes.
    pub fn num_classes(&self) -> i64 {
        self.num_classes
    }

    /// The different images, with the labels of all samples.
    pub(super) fn stock(&self) -> Option<Stock<'_>> {
        let (elements, size) = (self.transform.elements(), Size::square(self.transform.geometry.size()));
        let pool = self.pool.chunks_exact(elements).take(POOL);
        Some(Stock {
            size,
            images: pool.map(|bytes| Pixels::new(bytes, size, Layout::Planar)).collect::<Option<_>>()?,
            labels: (0..self.len).map(|index| self.label(index)).collect(),
            transform: &self.transform,
        })
    }
}

impl Paint for Dummy {
    fn transform(&self) -> &Transform {
        &self.transform
    }

    fn label(&self, index: usize) -> i64 {
        index as i64 % self.num_classes.max(1)
    }

    fn paint(&self, sample: Sample, painter: &mut Painter<'_>, out: &mut [f32]) -> Result<(), Cause> {
        let (elements, size) = (self.transform.elements(), Size::square(self.transform.geometry.size()));
        let bytes = &self.pool[sample.index % POOL * elements..][..elements];
        let pixels = Pixels::new(bytes, size, Layout::Planar).ok_or("an image of the wrong size")?;
        Ok(painter.paint(&pixels, &mut sample.rng(), out)?)
    }
}

impl Dataset for Dummy {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        assemble::batch(self, samples)
    }

    fn name(&self, index: usize) -> String {
        format!("made-up image {index}")
    }

    fn pin_memory(&self, batch: ImageBatch) -> Result<ImageBatch, TorchError> {
        batch.pin_memory()
    }
}

impl std::fmt::Debug for Dummy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dummy").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::{Flip, Geometry, Normalize};

    #[test]
    fn images_have_the_right_size_and_labels_cycle() {
        let geometry = Geometry::CenterCrop { resize: None, size: 40 };
        let transform = Transform { geometry, flip: Flip::Never, normalize: Normalize::imagenet() };
        let data = Dummy::new(100, 3, transform);
        let samples: Vec<_> = (97..100).map(|index| Sample::new(0, 0, index)).collect();
        let batch = data.batch(&samples).unwrap();
        assert_eq!((data.len(), batch.images.size()), (100, vec![3, 3, 40, 40]));
        assert_eq!(Vec::<i64>::try_from(batch.labels).unwrap(), [1, 2, 0]);
    }
}
