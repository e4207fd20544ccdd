//! How a buffer is divided: into parts that ranks own, and into chunks that fit a staging buffer.
//!
//! A **part** is what one rank reduces or holds; a **chunk** is what moves in one round; a **cell** is what one rank gives or
//! gets, with a length from a list of counts. All arithmetic on lengths is here, on plain numbers, so that property tests can
//! cover it.

use std::borrow::Cow;
use std::ops::Range;

/// Boundaries of parts are multiples of this many bytes, so that no two ranks write to one cache line.
const ALIGNMENT: usize = 64;

/// Part `index` of `parts` of `len` elements of `size` bytes: nearly equal, in order, without gap or overlap, and with
/// boundaries on cache lines where `len` allows.
pub(crate) fn part(len: usize, parts: usize, index: usize, size: usize) -> Range<usize> {
    let unit = (ALIGNMENT / size).max(1);
    let units = len.div_ceil(unit);
    let bound = |i: usize| ((units / parts * i + (units % parts).min(i)) * unit).min(len);
    bound(index)..bound(index + 1)
}

/// The chunks of `0..len`, each `chunk` long except the last. There is one empty chunk if `len` is 0, since a call makes at
/// least one round.
pub(crate) fn chunks(len: usize, chunk: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    assert!(chunk > 0, "a chunk holds at least one element");
    (0..len.div_ceil(chunk).max(1)).map(move |i| i * chunk..len.min((i + 1) * chunk))
}

/// The part of `0..len` that lies in `window`.
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

/// The sum of `counts`; `None` if that many elements of `size` bytes are more than a buffer can hold.
pub(crate) fn total(counts: impl IntoIterator<Item = usize>, size: usize) -> Option<usize> {
    let sum = counts.into_iter().try_fold(0usize, |sum, count| sum.checked_add(count))?;
    sum.checked_mul(size).filter(|&bytes| bytes <= isize::MAX as usize).map(|_| sum)
}

/// Divides `slice` into consecutive cells of these lengths.
pub(crate) fn cells<T>(
    mut slice: &mut [T],
    counts: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = &mut [T]> {
    counts.into_iter().map(move |count| {
        let (cell, rest) = std::mem::take(&mut slice).split_at_mut(count);
        slice = rest;
        cell
    })
}

/// A buffer with one cell for each rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cells<'a, T> {
    pub(crate) data: &'a [T],
    /// The length of each cell.
    pub(crate) counts: &'a [usize],
}

/// A buffer with one cell for each rank, to be filled.
#[derive(Debug)]
pub(crate) struct CellsMut<'a, T> {
    pub(crate) data: &'a mut [T],
    /// The length of each cell.
    pub(crate) counts: &'a [usize],
}

/// Of a buffer with `counts[i]` elements for rank `i`: the cell of `me`, and the other cells with their ranks.
pub(crate) fn own_and_others<T>(
    slice: &mut [T],
    counts: impl IntoIterator<Item = usize>,
    me: usize,
) -> (&mut [T], Vec<(usize, &mut [T])>) {
    let mut others: Vec<_> = cells(slice, counts).enumerate().collect();
    let (_, own) = others.remove(me);
    (own, others)
}

/// Some cells of a buffer that has one for each rank, in any order, used as if they lay end to end.
#[derive(Debug)]
pub(crate) struct Selection {
    ranges: Vec<Range<usize>>,
}

impl Selection {
    /// The cells of `ranks`, in that order, of a buffer with `counts[i]` elements for rank `i`.
    pub(crate) fn new(counts: &[usize], ranks: impl IntoIterator<Item = usize>) -> Self {
        let starts = offsets(counts);
        let ranges = ranks.into_iter().map(|rank| starts[rank]..starts[rank] + counts[rank]).collect();
        Self { ranges }
    }

    /// The range of all cells, if they do lie end to end: then nothing needs to be copied.
    fn span(&self) -> Option<Range<usize>> {
        let span = self.ranges.first()?.start..self.ranges.last()?.end;
        self.ranges.windows(2).all(|pair| pair[0].end == pair[1].start).then_some(span)
    }

    /// The cells of `data`, end to end.
    pub(crate) fn pick<'d, T: Copy>(&self, data: &'d [T]) -> Cow<'d, [T]> {
        match self.span() {
            Some(span) => Cow::Borrowed(&data[span]),
            None => self.ranges.iter().flat_map(|range| &data[range.clone()]).copied().collect(),
        }
    }

    /// Lets `act` write the cells of `data` as if they lay end to end.
    pub(crate) fn fill<T: Copy, E>(
        &self,
        data: &mut [T],
        act: impl FnOnce(&mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some(span) = self.span() {
            return act(&mut data[span]);
        }
        let mut joined = self.pick(data).into_owned();
        act(&mut joined)?;
        let mut rest = &joined[..];
        for range in &self.ranges {
            let (cell, after) = rest.split_at(range.len());
            data[range.clone()].copy_from_slice(cell);
            rest = after;
        }
        Ok(())
    }
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

    proptest! {
        #[test]
        fn a_selection_picks_and_fills_the_same_cells(
            counts in prop::collection::vec(0usize..5, 1..9),
            order in prop::collection::vec(0usize..9, 0..9),
        ) {
            let mut ranks: Vec<usize> = order.into_iter().filter(|&rank| rank < counts.len()).collect();
            let mut seen = std::collections::HashSet::new();
            ranks.retain(|&rank| seen.insert(rank));
            let selection = Selection::new(&counts, ranks.iter().copied());
            let mut data: Vec<usize> = (0..counts.iter().sum()).collect();
            let starts = offsets(&counts);
            let want: Vec<usize> =
                ranks.iter().flat_map(|&rank| starts[rank]..starts[rank] + counts[rank]).collect();
            prop_assert_eq!(&*selection.pick(&data), &want[..]);
            selection
                .fill(&mut data, |cells| {
                    assert_eq!(cells.len(), want.len());
                    cells.iter_mut().for_each(|x| *x += 1000);
                    Ok::<(), ()>(())
                })
                .unwrap();
            for (i, x) in data.into_iter().enumerate() {
                prop_assert_eq!(x, if want.contains(&i) { i + 1000 } else { i });
            }
        }
    }

    #[test]
    fn cells_lie_end_to_end() {
        let mut data = [1, 2, 3, 4, 5];
        let got: Vec<Vec<i32>> = cells(&mut data, [2, 0, 3]).map(|cell| cell.to_vec()).collect();
        assert_eq!(got, [vec![1, 2], vec![], vec![3, 4, 5]]);
    }

    #[test]
    fn a_total_that_no_buffer_can_hold_is_none() {
        assert_eq!(total([3, 0, 4], 8), Some(7));
        assert_eq!(total([], 8), Some(0));
        assert_eq!(total([usize::MAX, 1], 1), None);
        assert_eq!(total([usize::MAX / 2, 1], 1), None);
        assert_eq!(total([1 << 60, 1 << 60], 1), Some(1 << 61));
        assert_eq!(total([1 << 60, 1 << 60], 8), None);
    }

    #[test]
    fn offsets_are_running_sums() {
        assert_eq!(offsets(&[3, 0, 2]), [0, 3, 3]);
        assert!(offsets(&[]).is_empty());
    }
}
