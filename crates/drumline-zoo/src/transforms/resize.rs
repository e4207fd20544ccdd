//! Antialiased bilinear resizing, as in PIL.

use fast_image_resize::images::{CroppedImage, Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions};

use super::error::TransformError;
use super::pixels::{Layout, Pixels, Size};

/// A region of an image, and the size it is resized to. The region is treated as a whole image: pixels around it have
/// no influence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resize {
    pub(super) left: usize,
    pub(super) top: usize,
    pub(super) region: Size,
    /// The size of the result.
    pub(super) size: Size,
}

/// Resizes images, and reuses its memory for the next one.
#[derive(Debug, Default)]
pub(super) struct Resizer {
    resizer: fast_image_resize::Resizer,
    resized: Vec<u8>,
}

impl Resizer {
    pub(super) fn resize(
        &mut self,
        source: &Pixels<'_>,
        resize: Resize,
    ) -> Result<Pixels<'_>, TransformError> {
        self.resized.resize(3 * resize.size.area(), 0);
        let interleaved;
        let bytes = match source.layout {
            Layout::Interleaved => source.bytes,
            Layout::Planar => {
                interleaved = source.interleaved();
                &interleaved
            }
        };
        self.convolve(bytes, source.size, resize).map_err(TransformError::Resize)?;
        Ok(Pixels { bytes: &self.resized, size: resize.size, layout: Layout::Interleaved })
    }

    fn convolve(
        &mut self,
        bytes: &[u8],
        size: Size,
        resize: Resize,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let source = ImageRef::new(size.width as u32, size.height as u32, bytes, PixelType::U8x3)?;
        let [left, top] = [resize.left as u32, resize.top as u32];
        let Size { width, height } = resize.region;
        let region = CroppedImage::new(&source, left, top, width as u32, height as u32)?;
        let Size { width, height } = resize.size;
        let mut target =
            Image::from_slice_u8(width as u32, height as u32, &mut self.resized, PixelType::U8x3)?;
        let filter = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Bilinear));
        self.resizer.resize(&region, &mut target, &filter)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::Geometry;

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden");

    fn source() -> image::RgbImage {
        image::open(format!("{GOLDEN}/image_resize.png")).unwrap().into_rgb8()
    }

    fn size(image: &image::RgbImage) -> Size {
        Size { width: image.width() as usize, height: image.height() as usize }
    }

    fn golden(part: &str) -> Vec<u8> {
        let text = std::fs::read(format!("{GOLDEN}/image_resize.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
        serde_json::from_value(golden[part].clone()).unwrap()
    }

    fn furthest(a: &[u8], b: &[u8]) -> u8 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| a.abs_diff(*b)).max().unwrap()
    }

    #[test]
    fn regions_match_pil_to_one_grey_level() {
        let image = source();
        let source = Pixels::new(image.as_raw(), size(&image), Layout::Interleaved).unwrap();
        let region = golden("region").iter().map(|x| usize::from(*x)).collect::<Vec<_>>();
        let [left, top, width, height] = region[..] else { panic!("{region:?}") };
        let smaller = Resize { left, top, region: Size { width, height }, size: Size::square(24) };
        let larger = Resize { left: 30, top: 20, region: Size::square(10), size: Size::square(24) };
        for (resize, part) in [(smaller, "resized_crop"), (larger, "larger")] {
            let mut resizer = Resizer::default();
            let resized = resizer.resize(&source, resize).unwrap();
            assert!(furthest(resized.bytes, &golden(part)) <= 1, "{part}");
        }
    }

    #[test]
    fn the_centre_of_a_resized_image_matches_pil() {
        let image = source();
        let size = size(&image);
        let source = Pixels::new(image.as_raw(), size, Layout::Interleaved).unwrap();
        let planar: Vec<u8> =
            (0..3).flat_map(|channel| image.as_raw().iter().skip(channel).step_by(3).copied()).collect();
        let planar = Pixels::new(&planar, size, Layout::Planar).unwrap();
        let geometry = Geometry::CenterCrop { resize: Some(30), size: 24 };
        let plan = geometry.plan(size, &mut drumline::data::Sample::new(0, 0, 0).rng()).unwrap();
        let (left, top) = (plan.left as usize, plan.top as usize);
        for source in [source, planar] {
            let mut resizer = Resizer::default();
            let resized = resizer.resize(&source, plan.resize.unwrap()).unwrap();
            let rows =
                (top..top + 24).map(|row| &resized.bytes[3 * (row * resized.size.width + left)..][..3 * 24]);
            assert!(furthest(&rows.collect::<Vec<_>>().concat(), &golden("centre")) <= 1);
        }
    }
}
