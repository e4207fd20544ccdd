//! Builds a batch: writes each image into its place.

use drumline_torch::tensor_from_vec;
use tch::Tensor;

use crate::transforms::{Painter, Transform};
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};

/// Why an image cannot be read.
pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A dataset whose images are written one by one.
pub(super) trait Paint: Dataset {
    fn transform(&self) -> &Transform;

    fn label(&self, index: usize) -> i64;

    fn paint(&self, sample: Sample, painter: &mut Painter<'_>, out: &mut [f32]) -> Result<(), Cause>;
}

/// Builds a batch in one allocation, which the tensor takes over.
pub(super) fn batch(data: &impl Paint, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
    let (size, elements) = (data.transform().geometry.size() as i64, data.transform().elements());
    let mut painter = data.transform().painter();
    let mut images = vec![0f32; elements * samples.len()];
    for (sample, out) in samples.iter().zip(images.chunks_exact_mut(elements)) {
        data.paint(*sample, &mut painter, out)
            .map_err(|cause| SampleError::new(sample.index, data.name(sample.index), cause))?;
    }
    let labels: Vec<_> = samples.iter().map(|sample| data.label(sample.index)).collect();
    let indices: Vec<_> = samples.iter().map(|sample| sample.index).collect();
    let first = indices.first().copied().unwrap_or_default();
    let images = tensor_from_vec(images, &[samples.len() as i64, 3, size, size])
        .map_err(|error| SampleError::new(first, "a whole batch", error))?;
    Ok(ImageBatch { images, labels: Tensor::from_slice(&labels), indices })
}
