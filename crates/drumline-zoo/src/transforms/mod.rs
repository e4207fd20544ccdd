//! From an image's bytes to its place in the batch.
//!
//! ```text
//!   u8 pixels ─▶ [resize a region: u8] ─▶ window: crop, pad, mirror, normalise by table ─▶ f32 memory of the batch
//!                 only where sizes differ      one pass over the output, nothing in between
//! ```
//! What is random comes from the sample's generator, so a sample looks the same whoever makes it.

mod geometry;
mod normalize;
mod pixels;
mod resize;
mod window;

pub use geometry::Geometry;
pub use normalize::Normalize;
pub use pixels::{Layout, Pixels};
pub(crate) use window::Window;

use drumline::SampleRng;
use resize::{Resize, Resizer};

/// Whether images are mirrored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flip {
    /// As they are.
    Never,
    /// Every other one, by chance, left to right.
    Random,
}

/// How images become tensors.
#[derive(Debug, Clone)]
pub struct Transform {
    /// Which part of the image is taken, at what size.
    pub geometry: Geometry,
    /// Whether it is mirrored.
    pub flip: Flip,
    /// What numbers stand for its colours.
    pub normalize: Normalize,
}

impl Transform {
    /// CIFAR for training: a random crop of the image padded by 4, mirrored by chance.
    pub fn cifar_train() -> Self {
        let geometry = Geometry::RandomCrop { size: 32, padding: 4 };
        Self { geometry, flip: Flip::Random, normalize: Normalize::cifar() }
    }

    /// CIFAR as it is.
    pub fn cifar_test() -> Self {
        let geometry = Geometry::CenterCrop { resize: None, size: 32 };
        Self { geometry, flip: Flip::Never, normalize: Normalize::cifar() }
    }

    /// ImageNet for training: a random part at a random aspect, mirrored by chance.
    pub fn imagenet_train(size: usize) -> Self {
        let geometry = Geometry::RandomResizedCrop { size };
        Self { geometry, flip: Flip::Random, normalize: Normalize::imagenet() }
    }

    /// ImageNet for evaluation: the shorter side brought to `resize`, then the centre.
    pub fn imagenet_test(resize: usize, size: usize) -> Self {
        let geometry = Geometry::CenterCrop { resize: Some(resize), size };
        Self { geometry, flip: Flip::Never, normalize: Normalize::imagenet() }
    }

    /// f32 elements of an image: three channels of `size` × `size`.
    pub fn elements(&self) -> usize {
        3 * self.geometry.size() * self.geometry.size()
    }

    /// All that is random of an image of this width and height: which region is resized, if any, and which window is taken then.
    fn draw(&self, sizes: (usize, usize), rng: &mut SampleRng) -> Result<(Option<Resize>, Window), String> {
        let plan = self.geometry.plan(sizes, rng)?;
        let mirrored = self.flip == Flip::Random && rng.chance(0.5);
        let window = Window { left: plan.left, top: plan.top, size: self.geometry.size(), mirrored };
        Ok((plan.resize, window))
    }

    /// The window of an image of this width and height, drawn as a [`Painter`] draws it; an error that says why, where images are resized.
    pub(crate) fn window(&self, sizes: (usize, usize), rng: &mut SampleRng) -> Result<Window, String> {
        match self.draw(sizes, rng)? {
            (None, window) => Ok(window),
            (Some(_), _) => Err("images are resized, which is done by the processor".to_owned()),
        }
    }

    /// Something that writes many images, with memory for what lies between.
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
    /// Write one image; `out` has [`Transform::elements`]. The error says what does not fit.
    pub fn paint(&mut self, source: &Pixels<'_>, rng: &mut SampleRng, out: &mut [f32]) -> Result<(), String> {
        let (resize, window) = self.transform.draw((source.width, source.height), rng)?;
        match resize {
            None => window.paint(source, &self.transform.normalize, out),
            Some(resize) => {
                window.paint(&self.resizer.resize(source, resize)?, &self.transform.normalize, out);
            }
        }
        Ok(())
    }
}
