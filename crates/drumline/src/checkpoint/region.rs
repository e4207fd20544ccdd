//! Regions of a global tensor, and which elements two of them share. Pure functions.
//!
//! ```text
//!   a chunk: offsets [0, 0], shape [2, 6]     wanted: offsets [1, 2], shape [2, 3], both of a tensor of 4 × 6
//!     A A A A A A                               · · · · · ·
//!     A A A A A A                               · · w w w ·    one run of three elements: from the chunk's
//!     · · · · · ·                               · · w w w ·    element 8 to element 0 of what is wanted
//!     · · · · · ·                               · · · · · ·
//! ```
//! A *region* is a box: its offsets in the global tensor, and its shape. Its elements are in row-major order, in files
//! and in memory. A *chunk* is the region that one file holds. A *run* is a row of elements that are adjacent in a
//! chunk and in the wanted region. A split that is not a box, such as a flat cut inside a row, is several regions.
//!
//! Not here: names, types and files (`index`).

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A box in a global tensor.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    offsets: Vec<usize>,
    shape: Vec<usize>,
}

/// A region that is not inside of its tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("offsets {offsets:?} and shape {shape:?} are no region of a tensor of shape {global:?}")]
pub struct NoSuchRegion {
    /// Where it would begin.
    pub offsets: Vec<usize>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The shape of the global tensor.
    pub global: Vec<usize>,
}

/// Elements that are adjacent in a chunk and in the wanted region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    /// The index of the first one in the chunk.
    pub(super) from: usize,
    /// The index of the first one in the wanted region.
    pub(super) to: usize,
    pub(super) len: usize,
}

impl Region {
    /// The region of a tensor of shape `global` that begins at `offsets`.
    pub fn new(offsets: &[usize], shape: &[usize], global: &[usize]) -> Result<Self, NoSuchRegion> {
        let is_within =
            |dim: usize| offsets[dim].checked_add(shape[dim]).is_some_and(|end| end <= global[dim]);
        if offsets.len() == global.len() && shape.len() == global.len() && (0..global.len()).all(is_within) {
            return Ok(Self { offsets: offsets.to_vec(), shape: shape.to_vec() });
        }
        let [offsets, shape, global] = [offsets, shape, global].map(<[usize]>::to_vec);
        Err(NoSuchRegion { offsets, shape, global })
    }

    /// All of a tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Self { offsets: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Where it begins in the global tensor.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// How many elements it has along each dim.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many elements it has; a tensor without dims has one.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().fold(1, |num, size| num.saturating_mul(*size))
    }

    /// Where it ends along each dim.
    pub(super) fn ends(&self) -> Vec<usize> {
        self.offsets.iter().zip(&self.shape).map(|(offset, size)| offset + size).collect()
    }

    fn range(&self, dim: usize) -> Range<usize> {
        self.offsets[dim]..self.offsets[dim] + self.shape[dim]
    }

    /// The intersection of two regions of one tensor; `None` if it is empty.
    pub(super) fn intersection(&self, other: &Self) -> Option<Self> {
        let shared = |dim| {
            let (one, two) = (self.range(dim), other.range(dim));
            one.start.max(two.start)..one.end.min(two.end)
        };
        let ranges: Vec<Range<usize>> = (0..self.shape.len()).map(shared).collect();
        if ranges.iter().any(Range::is_empty) {
            return None;
        }
        let offsets = ranges.iter().map(|range| range.start).collect();
        Some(Self { offsets, shape: ranges.iter().map(Range::len).collect() })
    }

    /// The runs of `wanted` that this chunk holds: as few as possible, in the order of the chunk.
    pub(super) fn runs(&self, wanted: &Self) -> Vec<Run> {
        let Some(shared) = self.intersection(wanted) else { return Vec::new() };
        let is_full =
            |dim: usize| shared.shape[dim] == self.shape[dim] && shared.shape[dim] == wanted.shape[dim];
        // The inner dims that both have completely are contiguous, together with the shared part of the next outer dim.
        let num_full = (0..shared.shape.len()).rev().take_while(|dim| is_full(*dim)).count();
        let outer = (shared.shape.len() - num_full).saturating_sub(1);
        let len = shared.shape[outer..].iter().product();
        let num_runs: usize = shared.shape[..outer].iter().product();
        let run = |nth| {
            let at = shared.place_of_run(nth, outer);
            Run { from: self.position(&at), to: wanted.position(&at), len }
        };
        (0..num_runs).map(run).collect()
    }

    /// The position of the nth run in the global tensor, with one run for each index of the first `outer` dims.
    fn place_of_run(&self, nth: usize, outer: usize) -> Vec<usize> {
        let (mut place, mut rest) = (self.offsets.clone(), nth);
        for dim in (0..outer).rev() {
            place[dim] += rest % self.shape[dim];
            rest /= self.shape[dim];
        }
        place
    }

    /// The index in this region of an element of the global tensor.
    fn position(&self, at: &[usize]) -> usize {
        let dims = at.iter().zip(&self.offsets).zip(&self.shape);
        dims.fold(0, |position, ((at, offset), size)| position * size + (at - offset))
    }
}

/// Whether no two of these regions of one tensor share an element.
pub(super) fn are_disjoint(regions: &[&Region]) -> bool {
    let mut sorted: Vec<&Region> =
        regions.iter().copied().filter(|region| region.num_elements() > 0).collect();
    sorted.sort();
    let first_end = |region: &Region| region.ends().first().copied();
    sorted.iter().enumerate().all(|(place, one)| {
        // Sorted regions that begin after its end along the first dim share nothing with it.
        let near = sorted[place + 1..]
            .iter()
            .take_while(|two| two.offsets.first().copied() < first_end(one) || one.shape.is_empty());
        near.into_iter().all(|two| one.intersection(two).is_none())
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts a tensor into boxes at these places along each dim.
    pub(in super::super) fn grid(shape: &[usize], cuts: &[Vec<usize>]) -> Vec<Region> {
        let mut regions = vec![Region::whole(&[])];
        for (size, cuts) in shape.iter().zip(cuts) {
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (size + 1)).chain([*size]).collect();
            ends.sort();
            let ranges: Vec<Range<usize>> =
                ends.iter().scan(0, |start, end| Some(std::mem::replace(start, *end)..*end)).collect();
            let with = |region: &Region, range: &Range<usize>| Region {
                offsets: region.offsets.iter().copied().chain([range.start]).collect(),
                shape: region.shape.iter().copied().chain([range.len()]).collect(),
            };
            regions = regions
                .iter()
                .flat_map(|region| ranges.iter().map(|range| with(region, range)).collect::<Vec<_>>())
                .collect();
        }
        regions
    }

    /// A shape of up to four dims, zero-size ones among them, with cuts and a region.
    pub(in super::super) fn cut_shape() -> impl Strategy<Value = (Vec<usize>, Vec<Vec<usize>>, Region)> {
        let dim = (0usize..6, proptest::collection::vec(0usize..6, 0..4), 0usize..6, 0usize..6);
        proptest::collection::vec(dim, 0..4).prop_map(|dims| {
            let shape: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
            let cuts = dims.iter().map(|dim| dim.1.clone()).collect();
            let offsets: Vec<usize> = dims.iter().map(|dim| dim.2 % (dim.0 + 1)).collect();
            let sizes: Vec<usize> =
                dims.iter().zip(&offsets).map(|(dim, offset)| dim.3 % (dim.0 - offset + 1)).collect();
            let wanted = Region::new(&offsets, &sizes, &shape).unwrap();
            (shape, cuts, wanted)
        })
    }

    /// The global indices of a region's elements, in its order.
    pub(in super::super) fn elements(region: &Region, shape: &[usize]) -> Vec<usize> {
        let whole = Region::whole(shape);
        (0..region.num_elements()).map(|nth| whole.position(&region.place_of_run(nth, shape.len()))).collect()
    }

    proptest! {
        #[test]
        fn runs_of_all_chunks_cover_the_wanted_region_once((shape, cuts, wanted) in cut_shape()) {
            let mut found = vec![None; wanted.num_elements()];
            for chunk in grid(&shape, &cuts) {
                let held = elements(&chunk, &shape);
                let runs = chunk.runs(&wanted);
                prop_assert!(runs.windows(2).all(|pair| pair[0].from + pair[0].len <= pair[1].from));
                for Run { from, to, len } in runs {
                    prop_assert!(len > 0);
                    for nth in 0..len {
                        prop_assert_eq!(found[to + nth].replace(held[from + nth]), None);
                    }
                }
            }
            let expected: Vec<_> = elements(&wanted, &shape).into_iter().map(Some).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn a_grid_is_disjoint_and_one_region_twice_is_not((shape, cuts, wanted) in cut_shape()) {
            let regions = grid(&shape, &cuts);
            let mut all: Vec<&Region> = regions.iter().collect();
            prop_assert!(are_disjoint(&all));
            all.push(&wanted);
            prop_assert_eq!(are_disjoint(&all), wanted.num_elements() == 0);
        }
    }

    #[test]
    fn rows_are_one_run_and_columns_one_run_a_row() {
        let run = |from, to, len| Run { from, to, len };
        let region = |offsets: &[usize], shape: &[usize]| Region::new(offsets, shape, &[4, 6]).unwrap();
        let rows = region(&[0, 0], &[2, 6]);
        assert_eq!(rows.runs(&Region::whole(&[4, 6])), [run(0, 0, 12)]);
        assert_eq!(rows.runs(&region(&[1, 2], &[2, 3])), [run(8, 0, 3)]);
        assert_eq!(region(&[0, 2], &[4, 2]).runs(&Region::whole(&[4, 6])).len(), 4);
        assert_eq!(region(&[2, 0], &[2, 6]).runs(&region(&[0, 0], &[2, 6])), []);
        assert_eq!(Region::whole(&[]).runs(&Region::whole(&[])), [run(0, 0, 1)]);
    }

    #[test]
    fn a_box_outside_of_the_tensor_is_an_error() {
        for (offsets, shape) in
            [(&[1, 0][..], &[4, 6][..]), (&[0], &[4]), (&[usize::MAX, 0], &[2, 1]), (&[0, 0], &[4, 7])]
        {
            let error = Region::new(offsets, shape, &[4, 6]).unwrap_err().to_string();
            assert!(error.ends_with("are no region of a tensor of shape [4, 6]"), "{error}");
        }
        assert_eq!(Region::new(&[4, 0], &[0, 6], &[4, 6]).unwrap().num_elements(), 0);
    }
}
