//! Decodes JPEG and PNG files.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use image::{ImageError, ImageFormat, ImageReader, Limits, RgbImage};

use super::assemble::Cause;

/// Reads an image as RGB. Greyscale and transparent images are converted.
pub(super) fn decode(path: &Path) -> Result<RgbImage, Cause> {
    let bytes = fs::read(path)?;
    if bytes.is_empty() {
        return Err("the file is empty; try to fetch it again".into());
    }
    let format = match image::guess_format(&bytes) {
        Ok(ImageFormat::Jpeg) if !is_complete(&bytes) => {
            return Err("the JPEG is cut short; try to fetch it again".into());
        }
        Ok(format @ (ImageFormat::Jpeg | ImageFormat::Png)) => format,
        _ => return Err("neither JPEG nor PNG; try to convert it".into()),
    };
    // Decoding from memory instead of a generic reader: the decoders are then compiled once, in their own crate.
    let image = image::load_from_memory_with_format(&bytes, format);
    Ok(image.map_err(|error| refused(&error, &bytes, format))?.into_rgb8())
}

/// Why an image cannot be used: it is damaged, or it is too large.
fn refused(error: &ImageError, bytes: &[u8], format: ImageFormat) -> String {
    let size = || ImageReader::with_format(Cursor::new(bytes), format).into_dimensions().ok();
    match (error, size()) {
        (ImageError::Limits(_), Some((width, height))) => {
            let most = Limits::default().max_alloc.unwrap_or_default() >> 20;
            let needed = (u64::from(width) * u64::from(height)).saturating_mul(3) >> 20;
            format!(
                "the image has {width} x {height} pixels, {needed} MiB, and the limit is {most} MiB; try a smaller copy of it"
            )
        }
        _ => format!("{error}; try to fetch it again"),
    }
}

/// Whether a JPEG is complete. Decoders fill missing parts with grey. A thumbnail in the file has its own end marker,
/// but the image data begins after it.
fn is_complete(jpeg: &[u8]) -> bool {
    const END: [u8; 2] = [0xff, 0xd9];
    const SCAN: [u8; 2] = [0xff, 0xda];
    match jpeg.windows(2).rposition(|marker| marker == END) {
        Some(end) => !jpeg[end..].windows(2).any(|marker| marker == SCAN),
        None => false,
    }
}
