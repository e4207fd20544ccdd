//! Writes a square window of an image: cropped, optionally flipped, normalised, and black beyond the edges.

use super::normalize::Normalize;
use super::pixels::{Layout, Pixels, Size};

/// The part of an image that is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// The left edge in the image; negative if it is outside.
    pub(crate) left: isize,
    /// The upper edge in the image.
    pub(crate) top: isize,
    /// The side of the square.
    pub(crate) size: usize,
    /// Whether the window is flipped horizontally.
    pub(crate) mirrored: bool,
}

/// One row of one channel of an image.
struct Row<'a> {
    source: &'a Pixels<'a>,
    channel: usize,
    row: usize,
}

impl Window {
    /// Writes the three channels one after the other.
    pub(super) fn paint(&self, source: &Pixels<'_>, normalize: &Normalize, out: &mut [f32]) {
        for (channel, plane) in out.chunks_exact_mut(self.size * self.size).enumerate() {
            let table = normalize.table(channel);
            for (row, line) in (self.top..).zip(plane.chunks_exact_mut(self.size)) {
                match usize::try_from(row).ok().filter(|row| *row < source.size.height) {
                    Some(row) => self.paint_line(&Row { source, channel, row }, table, line),
                    None => line.fill(table[0]),
                }
            }
        }
    }

    fn paint_line(&self, of: &Row<'_>, table: &[f32; 256], line: &mut [f32]) {
        let Row { source, channel, row } = *of;
        let Size { width, height } = source.size;
        let (before, columns) = self.columns(width);
        let end = before + columns.len();
        let (left, rest) =
            if self.mirrored { (line.len() - end, before) } else { (before, line.len() - end) };
        let right = line.len() - rest;
        line[..left].fill(table[0]);
        line[right..].fill(table[0]);
        let line = &mut line[left..right];
        match source.layout {
            Layout::Planar => {
                let start = (channel * height + row) * width;
                let bytes = source.bytes[start..][columns].iter();
                self.look_up(bytes, table, line);
            }
            Layout::Interleaved => {
                let bytes = &source.bytes[3 * (row * width + columns.start)..][..3 * columns.len()];
                self.look_up(bytes.chunks_exact(3).map(|pixel| &pixel[channel]), table, line);
            }
        }
    }

    fn look_up<'a>(
        &self,
        bytes: impl DoubleEndedIterator<Item = &'a u8>,
        table: &[f32; 256],
        line: &mut [f32],
    ) {
        let write = |(number, byte): (&mut f32, &u8)| *number = table[usize::from(*byte)];
        if self.mirrored {
            line.iter_mut().zip(bytes.rev()).for_each(write);
        } else {
            line.iter_mut().zip(bytes).for_each(write);
        }
    }

    /// The number of columns left of the image, and the range of image columns that follow.
    fn columns(&self, width: usize) -> (usize, std::ops::Range<usize>) {
        let clamp = |column: isize| column.clamp(0, width as isize) as usize;
        let columns = clamp(self.left)..clamp(self.left + self.size as isize);
        let before = (-self.left).clamp(0, self.size as isize) as usize;
        (before, columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reference implementation, element by element.
    fn expected(source: &Pixels<'_>, window: &Window, normalize: &Normalize) -> Vec<f32> {
        let mut out = Vec::new();
        for channel in 0..3 {
            for (row, column) in (0..window.size).flat_map(|row| (0..window.size).map(move |c| (row, c))) {
                let column = if window.mirrored { window.size - 1 - column } else { column };
                let (x, y) = (window.left + column as isize, window.top + row as isize);
                let Size { width, height } = source.size;
                let inside = x >= 0 && y >= 0 && x < width as isize && y < height as isize;
                let place = y * width as isize + x;
                let byte = match source.layout {
                    _ if !inside => 0,
                    Layout::Planar => source.bytes[channel * source.size.area() + place as usize],
                    Layout::Interleaved => source.bytes[3 * place as usize + channel],
                };
                out.push(normalize.table(channel)[usize::from(byte)]);
            }
        }
        out
    }

    #[test]
    fn every_window_of_every_layout_matches_the_reference() {
        let normalize = Normalize::imagenet();
        for (width, height, size) in [(5, 4, 3), (3, 5, 6), (1, 1, 1), (4, 4, 4)] {
            let bytes: Vec<u8> = (0..3 * width * height).map(|i| (i * 37 % 251 + 1) as u8).collect();
            for layout in [Layout::Planar, Layout::Interleaved] {
                let source = Pixels::new(&bytes, Size { width, height }, layout).unwrap();
                for (left, top) in (-7..7).flat_map(|left| (-7..7).map(move |top| (left, top))) {
                    for mirrored in [false, true] {
                        let window = Window { left, top, size, mirrored };
                        let mut out = vec![f32::NAN; 3 * size * size];
                        window.paint(&source, &normalize, &mut out);
                        assert_eq!(out, expected(&source, &window, &normalize), "{window:?} {layout:?}");
                    }
                }
            }
        }
    }
}
