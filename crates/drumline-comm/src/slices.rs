//! How a buffer is cut: into parts that ranks own, and into chunks that fit a staging buffer.
//!
//! A **part** is what one rank reduces or holds; a **chunk** is what moves in one round. All arithmetic on lengths is
//! here, on plain numbers, so that property tests can cover it.

use std::ops::Range;

/// Boundaries of parts fall on multiples of this many bytes, so that no two ranks write one cache line.
const ALIGNMENT: usize = 64;

/// Part `index` of `parts` of `len` elements of `size` bytes: nearly equal, in order, without gap or overlap, and with
/// boundaries on cache lines where `len` allows.
pub(crate) fn part(len: usize, parts: usize, index: usize, size: usize) -> Range<usize> {
    let unit = (ALIGNMENT / size).max(1);
    let units = len.div_ceil(unit);
    let bound = |i: usize| ((units / parts * i + (units % parts).min(i)) * unit).min(len);
    bound(index)..bound(index + 1)
}

/// The chunks of `0..len`, each `chunk` long but the last; one empty chunk if there is nothing, since a call always makes
/// at least one round.
pub(crate) fn chunks(len: usize, chunk: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    assert!(chunk > 0, "a chunk holds at least one element");
    (0..len.div_ceil(chunk).max(1)).map(move |i| i * chunk..len.min((i + 1) * chunk))
}

/// The part of `0..len` that falls into `window`.
pub(crate) fn clip(len: usize, window: &Range<usize>) -> Range<usize> {
    window.start.min(len)..window.end.min(len)
}

/// Where each of `counts` starts when they are laid end to end.
pub(crate) fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut next = 0;
    counts
        .iter()
        .map(|count| {
            let start = next;
            next += count;
            start
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_buffer(len in 0usize..100_000, parts in 1usize..70, size in prop::sample::select(vec![1usize, 2, 4, 8])) {
            let mut next = 0;
            for index in 0..parts {
                let range = part(len, parts, index, size);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.start <= range.end);
                if range.end != len {
                    prop_assert_eq!(range.end * size % ALIGNMENT, 0);
                }
                next = range.end;
            }
            prop_assert_eq!(next, len);
        }

        #[test]
        fn parts_are_nearly_equal(len in 0usize..100_000, parts in 1usize..70) {
            let sizes: Vec<_> = (0..parts).map(|i| part(len, parts, i, 4).len()).collect();
            let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
            prop_assert!(most - least <= 2 * ALIGNMENT / 4, "{:?}", sizes);
        }

        #[test]
        fn chunks_tile_the_buffer(len in 0usize..100_000, chunk in 1usize..5_000) {
            let mut next = 0;
            for range in chunks(len, chunk) {
                prop_assert_eq!(range.start, next);
                prop_assert!((!range.is_empty() || len == 0) && range.len() <= chunk);
                next = range.end;
            }
            prop_assert_eq!(next, len);
        }

        #[test]
        fn clipping_stays_inside(len in 0usize..1000, start in 0usize..1000, extent in 0usize..1000) {
            let clipped = clip(len, &(start..start + extent));
            prop_assert!(clipped.start <= clipped.end && clipped.end <= len);
            prop_assert_eq!(clipped.len(), (start..start + extent).filter(|i| *i < len).count());
        }
    }

    #[test]
    fn offsets_are_running_sums() {
        assert_eq!(offsets(&[3, 0, 2]), [0, 3, 3]);
        assert!(offsets(&[]).is_empty());
    }
}
