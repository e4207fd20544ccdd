//! A view of an image's bytes.

/// The order of an image's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// CHW: all of red, then green, then blue, as in CIFAR's files.
    Planar,
    /// HWC: red, green and blue of each pixel, as decoders return them.
    Interleaved,
}

/// A view of an RGB image with one byte per channel, rows from the top.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) layout: Layout,
}

impl<'a> Pixels<'a> {
    /// Creates a view; `None` if there are not `width` × `height` × 3 bytes.
    pub fn new(bytes: &'a [u8], (width, height): (usize, usize), layout: Layout) -> Option<Self> {
        (bytes.len() == 3 * width * height).then_some(Self { bytes, width, height, layout })
    }

    /// The bytes in HWC order.
    pub(crate) fn interleaved(&self) -> Vec<u8> {
        match self.layout {
            Layout::Interleaved => self.bytes.to_vec(),
            Layout::Planar => {
                let plane = self.width * self.height;
                (0..3 * plane).map(|place| self.bytes[place % 3 * plane + place / 3]).collect()
            }
        }
    }
}
