//! Crops and sizes, with torchvision's rules.

use super::error::TransformError;
use super::pixels::Size;
use super::resize::Resize;
use drumline::data::SampleRng;

/// Which part of an image is used, and at what size. The result is a square.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Geometry {
    /// A random square crop of the image, padded with a black border.
    RandomCrop {
        /// The side of the crop.
        size: usize,
        /// The width of the border.
        padding: usize,
    },
    /// A random region with 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3, resized to a square.
    RandomResizedCrop {
        /// The side of the result.
        size: usize,
    },
    /// The square in the centre; black where the image is smaller.
    CenterCrop {
        /// Resizes the shorter side to this first.
        resize: Option<usize>,
        /// The side of the square.
        size: usize,
    },
}

/// The position of the crop, in the image or in the resized image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) resize: Option<Resize>,
    pub(super) left: isize,
    pub(super) top: isize,
}

impl Geometry {
    /// The side of the result.
    pub fn size(&self) -> usize {
        match self {
            Self::RandomCrop { size, .. }
            | Self::RandomResizedCrop { size }
            | Self::CenterCrop { size, .. } => *size,
        }
    }

    /// Whether some images of this size are resized.
    pub(crate) fn resizes(&self, image: Size) -> bool {
        match *self {
            Self::RandomCrop { .. } => false,
            Self::RandomResizedCrop { .. } => true,
            Self::CenterCrop { resize, .. } => resize.is_some_and(|shorter| shorter != image.shorter_side()),
        }
    }

    /// Chooses the region for an image of this size.
    pub(super) fn plan(&self, image: Size, rng: &mut SampleRng) -> Result<Plan, TransformError> {
        let Size { width, height } = image;
        match *self {
            _ if width == 0 || height == 0 => Err(TransformError::Empty),
            Self::RandomCrop { size, padding } if image.shorter_side() + 2 * padding < size => {
                Err(TransformError::TooSmall { width, height, padding, size })
            }
            Self::RandomCrop { size, padding } => {
                let mut place =
                    |side: usize| rng.below(side + 2 * padding - size + 1) as isize - padding as isize;
                Ok(Plan { resize: None, top: place(height), left: place(width) })
            }
            Self::RandomResizedCrop { size } => {
                let resize = random_region(image, size, rng);
                if resize.region == resize.size {
                    Ok(Plan { resize: None, left: resize.left as isize, top: resize.top as isize })
                } else {
                    Ok(Plan { resize: Some(resize), left: 0, top: 0 })
                }
            }
            Self::CenterCrop { resize, size } => {
                let scaled = resize.map_or(image, |shorter| scale(image, shorter));
                let resize = (scaled != image).then(|| whole(image, scaled));
                Ok(Plan { resize, left: centre(scaled.width, size), top: centre(scaled.height, size) })
            }
        }
    }
}

fn whole(region: Size, size: Size) -> Resize {
    Resize { left: 0, top: 0, region, size }
}

/// The size after the shorter side is scaled to `shorter`.
fn scale(Size { width, height }: Size, shorter: usize) -> Size {
    if width <= height {
        Size { width: shorter, height: shorter * height / width }
    } else {
        Size { width: shorter * width / height, height: shorter }
    }
}

/// The start of a centred square. Ties round to even, as in Python.
fn centre(side: usize, size: usize) -> isize {
    if side >= size {
        ((side - size) as f64 / 2.0).round_ties_even() as isize
    } else {
        -(((size - side) / 2) as isize)
    }
}

/// Tries ten random areas and aspect ratios; the fallback is the largest centred region with an allowed aspect ratio.
fn random_region(Size { width, height }: Size, side: usize, rng: &mut SampleRng) -> Resize {
    const ASPECTS: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];
    let between = |rng: &mut SampleRng, low: f64, high: f64| low + (high - low) * rng.uniform();
    for _ in 0..10 {
        let area = (width * height) as f64 * between(rng, 0.08, 1.0);
        let aspect = between(rng, ASPECTS[0].ln(), ASPECTS[1].ln()).exp();
        let root = |area: f64| area.sqrt().round_ties_even() as usize;
        let region = Size { width: root(area * aspect), height: root(area / aspect) };
        if (1..=width).contains(&region.width) && (1..=height).contains(&region.height) {
            let top = rng.below(height - region.height + 1);
            let left = rng.below(width - region.width + 1);
            return Resize { left, top, region, size: Size::square(side) };
        }
    }
    let aspect = (width as f64 / height as f64).clamp(ASPECTS[0], ASPECTS[1]);
    let rounded = |length: f64, most: usize| (length.round_ties_even() as usize).clamp(1, most);
    let region = Size {
        width: rounded(height as f64 * aspect, width),
        height: rounded(width as f64 / aspect, height),
    };
    let (left, top) = ((width - region.width) / 2, (height - region.height) / 2);
    Resize { left, top, region, size: Size::square(side) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline::data::Sample;

    fn size(width: usize, height: usize) -> Size {
        Size { width, height }
    }

    #[test]
    fn random_crops_cover_every_position() {
        let crop = Geometry::RandomCrop { size: 32, padding: 4 };
        let mut seen = [[0; 9]; 9];
        for index in 0..8100 {
            let plan = crop.plan(size(32, 32), &mut Sample::new(1, 0, index).rng()).unwrap();
            seen[(plan.left + 4) as usize][(plan.top + 4) as usize] += 1;
        }
        assert!(seen.as_flattened().iter().all(|count| (50..150).contains(count)), "{seen:?}");
        let refused = crop.plan(size(23, 40), &mut Sample::new(1, 0, 0).rng()).unwrap_err();
        assert!(
            matches!(refused, TransformError::TooSmall { width: 23, height: 40, padding: 4, size: 32 }),
            "{refused}"
        );
        assert!(refused.to_string().contains("23×40"), "{refused}");
    }

    #[test]
    fn random_regions_are_inside_the_image_with_valid_area_and_aspect() {
        let crop = Geometry::RandomResizedCrop { size: 224 };
        let (mut area, count) = (0.0, 2000);
        for index in 0..count {
            let plan = crop.plan(size(500, 375), &mut Sample::new(1, 0, index).rng()).unwrap();
            let resize = plan.resize.unwrap();
            let Size { width, height } = resize.region;
            assert!(resize.left + width <= 500 && resize.top + height <= 375, "{resize:?}");
            assert!((0.72..1.4).contains(&(width as f64 / height as f64)), "{resize:?}");
            area += (width * height) as f64 / (500.0 * 375.0) / count as f64;
        }
        assert!((0.42..0.45).contains(&area), "mean area {area}, torchvision's is 0.435");
        let whole = Geometry::RandomResizedCrop { size: 1 };
        let whole = whole.plan(size(1, 1), &mut Sample::new(1, 0, 0).rng());
        assert_eq!(whole.unwrap(), Plan { resize: None, left: 0, top: 0 });
        for image in [size(1000, 10), size(10, 1000), size(1, 1)] {
            let resize = crop.plan(image, &mut Sample::new(1, 0, 0).rng()).unwrap().resize.unwrap();
            assert!(resize.left + resize.region.width <= image.width);
            assert!(resize.top + resize.region.height <= image.height);
        }
    }

    #[test]
    fn the_centre_is_rounded_as_in_python() {
        assert_eq!(
            [(33, 32), (35, 32), (32, 32), (20, 32), (19, 32)].map(|(side, size)| centre(side, size)),
            [0, 2, 0, -6, -6]
        );
        assert_eq!(scale(size(500, 375), 256), size(341, 256));
        assert_eq!(scale(size(375, 500), 256), size(256, 341));
        let same = Geometry::CenterCrop { resize: None, size: 32 };
        let plan = same.plan(size(32, 32), &mut Sample::new(1, 0, 0).rng()).unwrap();
        assert_eq!(plan, Plan { resize: None, left: 0, top: 0 });
    }
}
