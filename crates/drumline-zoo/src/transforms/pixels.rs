//! A view of an image's bytes.

/// The order of an image's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// CHW: all of red, then green, then blue, as in CIFAR's files.
    Planar,
    /// HWC: red, green and blue of each pixel, as decoders return them.
    Interleaved,
}

/// The width and height of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

impl Size {
    /// The size of a square.
    pub const fn square(side: usize) -> Self {
        Self { width: side, height: side }
    }

    /// The number of pixels.
    pub const fn area(self) -> usize {
        self.width * self.height
    }

    /// The shorter of the two.
    pub fn shorter_side(self) -> usize {
        self.width.min(self.height)
    }
}

/// A view of an RGB image with one byte per channel, rows from the top.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) size: Size,
    pub(super) layout: Layout,
}

impl<'a> Pixels<'a> {
    /// Creates a view; `None` unless there are three bytes for each pixel.
    pub fn new(bytes: &'a [u8], size: Size, layout: Layout) -> Option<Self> {
        (bytes.len() == 3 * size.area()).then_some(Self { bytes, size, layout })
    }

    /// The bytes in HWC order.
    pub(crate) fn interleaved(&self) -> Vec<u8> {
        match self.layout {
            Layout::Interleaved => self.bytes.to_vec(),
            Layout::Planar => {
                let plane = self.size.area();
                (0..3 * plane).map(|place| self.bytes[place % 3 * plane + place / 3]).collect()
            }
        }
    }
}
