//! An image's bytes and how they lie.

/// The order of an image's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// All of red, then all of green, then all of blue, as in CIFAR's files.
    Planar,
    /// Red, green and blue of each pixel, as decoders give them.
    Interleaved,
}

/// A view of an image: three channels of one byte each, rows from the top.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) layout: Layout,
}

impl<'a> Pixels<'a> {
    /// A view of bytes; none if they are not `width` × `height` × 3.
    pub fn new(bytes: &'a [u8], (width, height): (usize, usize), layout: Layout) -> Option<Self> {
        (bytes.len() == 3 * width * height).then_some(Self { bytes, width, height, layout })
    }

    /// The image with interleaved bytes.
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
