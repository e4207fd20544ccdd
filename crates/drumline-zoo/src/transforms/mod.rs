//! Transforms: from an image's bytes to its place in the batch.
//!
//! ```text
//!   u8 pixels ─▶ [resize a region: u8] ─▶ window: crop, pad, mirror, normalise by table ─▶ f32 memory of the batch
//!                 only where sizes differ      one pass over the output, nothing in between
//! ```
//! Random numbers come from the sample's own generator, so a sample is the same on any rank or thread.

mod error;
mod geometry;
mod normalize;
mod pixels;
mod resize;
mod window;

pub use error::TransformError;
pub use geometry::Geometry;
pub use normalize::Normalize;
pub use pixels::{Layout, Pixels, Size};
pub(crate) use window::Window;

use drumline::data::SampleRng;
use resize::{Resize, Resizer};

/// Whether images are flipped horizontally.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flip {
    /// Never.
    Never,
    /// With probability 0.5.
    Random,
}

/// How images become tensors.
#[derive(Debug, Clone)]
pub struct Transform {
    /// Crop and resize.
    pub geometry: Geometry,
    /// Horizontal flip.
    pub flip: Flip,
    /// Normalisation.
    pub normalize: Normalize,
}

impl Transform {
    /// CIFAR training: a random crop with padding 4, and a random flip.
    pub fn cifar_train() -> Self {
        let geometry = Geometry::RandomCrop { size: 32, padding: 4 };
        Self { geometry, flip: Flip::Random, normalize: Normalize::cifar() }
    }

    /// CIFAR evaluation: no crop and no flip.
    pub fn cifar_test() -> Self {
        let geometry = Geometry::CenterCrop { resize: None, size: 32 };
        Self { geometry, flip: Flip::Never, normalize: Normalize::cifar() }
    }

    /// ImageNet training: a random resized crop and a random flip.
    pub fn imagenet_train(size: usize) -> Self {
        let geometry = Geometry::RandomResizedCrop { size };
        Self { geometry, flip: Flip::Random, normalize: Normalize::imagenet() }
    }

    /// ImageNet evaluation: resizes the shorter side to `resize`, then crops the centre.
    pub fn imagenet_test(resize: usize, size: usize) -> Self {
        let geometry = Geometry::CenterCrop { resize: Some(resize), size };
        Self { geometry, flip: Flip::Never, normalize: Normalize::imagenet() }
    }

    /// The number of f32 elements in an image: three channels of `size` × `size`.
    pub fn elements(&self) -> usize {
        3 * self.geometry.size() * self.geometry.size()
    }

    /// Draws all random choices for an image of this size: the region to resize, if any, and the window to
    /// crop from the result.
    fn draw(&self, size: Size, rng: &mut SampleRng) -> Result<(Option<Resize>, Window), TransformError> {
        let plan = self.geometry.plan(size, rng)?;
        let mirrored = self.flip == Flip::Random && rng.chance(0.5);
        let window = Window { left: plan.left, top: plan.top, size: self.geometry.size(), mirrored };
        Ok((plan.resize, window))
    }

    /// Draws the window of an image of this size, as a [`Painter`] does. Returns an error if the image must
    /// be resized.
    pub(crate) fn window(&self, size: Size, rng: &mut SampleRng) -> Result<Window, TransformError> {
        match self.draw(size, rng)? {
            (None, window) => Ok(window),
            (Some(_), _) => Err(TransformError::NeedsResize),
        }
    }

    /// Creates a painter, which reuses its memory for many images.
    pub fn painter(&self) -> Painter<'_> {
        Painter { transform: self, resizer: Resizer::default() }
    }
}

/// Writes images into a batch.
#[derive(Debug)]
pub struct Painter<'a> {
    transform: &'a Transform,
    resizer: Resizer,
}

impl Painter<'_> {
    /// Writes one image to `out`, which has [`Transform::elements`] elements.
    pub fn paint(
        &mut self,
        source: &Pixels<'_>,
        rng: &mut SampleRng,
        out: &mut [f32],
    ) -> Result<(), TransformError> {
        let (resize, window) = self.transform.draw(source.size, rng)?;
        match resize {
            None => window.paint(source, &self.transform.normalize, out),
            Some(resize) => {
                window.paint(&self.resizer.resize(source, resize)?, &self.transform.normalize, out);
            }
        }
        Ok(())
    }
}
