//! Where a dim is cut: pure arithmetic.
//!
//! ```text
//!   10 over 4 ranks     0 1 2 | 3 4 5 | 6 7 | 8 9      the first `10 % 4` ranks have one more, as PyTorch's tensor_split
//! ```

use std::ops::Range;

/// A dim of this length, cut into parts of nearly equal length.
///
/// ```
/// use drumline_parallel::tensor::Cut;
///
/// let cut = Cut::new(10, 4);
/// assert_eq!([0, 1, 2, 3].map(|rank| cut.range(rank)), [0..3, 3..6, 6..8, 8..10]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    len: i64,
    parts: i64,
}

impl Cut {
    /// Cuts `len` elements into `parts` parts, which are at least one.
    pub fn new(len: i64, parts: usize) -> Self {
        Self { len, parts: parts.max(1) as i64 }
    }

    /// The elements of a part. With more parts than elements, the last parts are empty.
    pub fn range(&self, part: usize) -> Range<i64> {
        let (part, longer) = (part as i64, self.len % self.parts);
        let start = part * (self.len / self.parts) + part.min(longer);
        start..start + self.len / self.parts + i64::from(part < longer)
    }

    /// The length of the longest part.
    pub fn longest(&self) -> i64 {
        (self.len + self.parts - 1) / self.parts
    }

    /// The number of elements of all parts.
    pub fn whole(&self) -> i64 {
        self.len
    }

    /// Whether all parts have the same length.
    pub fn is_even(&self) -> bool {
        self.len % self.parts == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_one_another_and_differ_by_one_at_most() {
        for (len, parts) in (0..40).flat_map(|len| (1..12).map(move |parts| (len, parts))) {
            let cut = Cut::new(len, parts);
            let ranges: Vec<_> = (0..parts).map(|part| cut.range(part)).collect();
            let all: Vec<i64> = ranges.iter().cloned().flatten().collect();
            assert_eq!(all, (0..len).collect::<Vec<_>>(), "{len} over {parts}");
            let lens: Vec<_> = ranges.iter().map(|range| range.end - range.start).collect();
            let (least, most) = (lens.iter().min().copied().unwrap(), lens.iter().max().copied().unwrap());
            assert!(most - least <= 1 && most == cut.longest(), "{len} over {parts}: {lens:?}");
            assert_eq!(cut.is_even(), most == least, "{len} over {parts}");
        }
    }
}
