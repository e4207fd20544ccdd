//! Which places of a text each rank has: pure arithmetic.
//!
//! ```text
//!   12 places on 3 ranks, in 6 chunks     0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11
//!                                         rank 0  1     2     2     1       0
//! ```
//! With a causal mask, late places see more than early ones. Each rank has one early chunk and one late one, so that all
//! have the same work.

use std::ops::Range;

use tch::{TchError, Tensor};

use crate::tensor::Cut;

/// A dim of this length, of which each rank has two chunks.
///
/// ```
/// use drumline_parallel::context::ZigZag;
///
/// let cut = ZigZag::new(12, 3);
/// assert_eq!(cut.chunks(1), [2..4, 8..10]);
/// // Lengths that the ranks do not divide differ by two at most.
/// assert_eq!([0, 1, 2].map(|rank| ZigZag::new(13, 3).len_of(rank)), [5, 4, 4]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZigZag {
    chunks: Cut,
    ranks: usize,
}

impl ZigZag {
    /// Cuts `len` places for this many ranks, which are at least one.
    pub fn new(len: i64, ranks: usize) -> Self {
        let ranks = ranks.max(1);
        Self { chunks: Cut::new(len, 2 * ranks), ranks }
    }

    /// The places of a rank: an early chunk and a late one.
    pub fn chunks(&self, rank: usize) -> [Range<i64>; 2] {
        [rank, 2 * self.ranks - 1 - rank].map(|chunk| self.chunks.range(chunk))
    }

    /// The number of places of a rank.
    pub fn len_of(&self, rank: usize) -> i64 {
        self.chunks(rank).iter().map(|chunk| chunk.end - chunk.start).sum()
    }

    /// The number of places of all ranks.
    pub fn whole(&self) -> i64 {
        self.chunks.whole()
    }

    /// The number of places in a rank's early chunk.
    pub(super) fn early_len(&self, rank: usize) -> i64 {
        let [early, _] = self.chunks(rank);
        early.end - early.start
    }

    /// A rank's places of a whole tensor, in their order.
    pub fn part_of(&self, whole: &Tensor, dim: i64, rank: usize) -> Result<Tensor, TchError> {
        if self.ranks == 1 {
            return Ok(whole.shallow_clone());
        }
        let [early, late] =
            self.chunks(rank).map(|chunk| whole.f_narrow(dim, chunk.start, chunk.end - chunk.start));
        Tensor::f_cat(&[early?, late?], dim)
    }

    /// The whole tensor, of all ranks' parts.
    pub fn joined(&self, parts: &[Tensor], dim: i64) -> Result<Tensor, TchError> {
        let early = |(rank, part): (usize, &Tensor)| part.f_narrow(dim, 0, self.early_len(rank));
        let late = |(rank, part): (usize, &Tensor)| {
            let early = self.early_len(rank);
            part.f_narrow(dim, early, self.len_of(rank) - early)
        };
        let ranks = parts.iter().enumerate();
        let chunks = ranks.clone().map(early).chain(ranks.rev().map(late));
        Tensor::f_cat(&chunks.collect::<Result<Vec<_>, _>>()?, dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn each_place_is_on_one_rank_and_parts_join_to_the_whole() {
        for (len, ranks) in (0..30).flat_map(|len| (1..6).map(move |ranks| (len, ranks))) {
            let cut = ZigZag::new(len, ranks);
            let whole = Tensor::arange(len, (Kind::Int64, Device::Cpu)).view([1, len]);
            let parts: Vec<_> = (0..ranks).map(|rank| cut.part_of(&whole, 1, rank).unwrap()).collect();
            let lens: Vec<_> = parts.iter().map(|part| part.size()[1]).collect();
            assert_eq!(lens, (0..ranks).map(|rank| cut.len_of(rank)).collect::<Vec<_>>(), "{len} on {ranks}");
            assert_eq!(cut.joined(&parts, 1).unwrap(), whole, "{len} on {ranks}");
            assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 2, "{lens:?}");
        }
    }

    #[test]
    fn causal_work_is_the_same_on_all_ranks() {
        let cut = ZigZag::new(64, 4);
        let work = |rank| cut.chunks(rank).into_iter().flatten().map(|place| place + 1).sum::<i64>();
        assert_eq!([0, 1, 2, 3].map(work), [520; 4]);
    }
}
