//! How the ranks of a mesh are arranged: pure arithmetic on rank numbers.
//!
//! ```text
//!   pp 2, dp 2, tp 2          rank = (pp * 2 + dp) * 2 + tp        the last axis is the innermost:
//!     pp 0: dp 0: 0 1         along tp:       {0 1} {2 3} {4 5} {6 7}    its ranks are neighbours
//!           dp 1: 2 3         along dp:       {0 2} {1 3} {4 6} {5 7}
//!     pp 1: dp 0: 4 5         along dp × tp:  {0 1 2 3} {4 5 6 7}
//!           dp 1: 6 7
//! ```
//! Not here: the groups along the axes (`mesh`).

use std::fmt;
use std::str::FromStr;

/// A dimension of a mesh: one way in which its ranks differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Pipeline parallel: each rank has some of the layers.
    Pp,
    /// Data parallel: each rank has a replica of the model, and its own samples.
    Dp,
    /// Sharded data parallel: each rank has a part of every parameter, and its own samples.
    Shard,
    /// Context parallel: each rank has some of the tokens of the same samples.
    Cp,
    /// Tensor parallel: each rank has a part of a layer's matrices.
    Tp,
}

/// How many ranks a mesh has along each axis, 1 by default.
///
/// ```
/// use drumline_comm::{Axis, MeshShape};
///
/// let shape = MeshShape::default().with(Axis::Tp, 2).with(Axis::Dp, 4);
/// assert_eq!(shape.num_ranks(), 8);
/// assert_eq!(shape.place(5), "dp 2, tp 1");
/// assert_eq!(shape.peers(5, &[Axis::Dp]), [1, 3, 5, 7]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshShape {
    sizes: [usize; Axis::ALL.len()],
}

/// A shape that does not fit the number of ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// The sizes multiply to another number.
    #[error(
        "the mesh {shape} has {} ranks, the group has {num_ranks}; try sizes whose product is {num_ranks}: its divisors are {}",
        shape.num_ranks(), divisors(*num_ranks)
    )]
    Product {
        /// What was asked for.
        shape: MeshShape,
        /// Ranks of the group.
        num_ranks: usize,
    },
    /// The other sizes do not divide the number of ranks, so the last axis cannot take the rest.
    #[error(
        "the mesh {shape} takes {} ranks, which does not divide the group's {num_ranks}, so that {axis} cannot take the rest; \
         try sizes among the divisors of {num_ranks}: {}",
        shape.num_ranks(), divisors(*num_ranks)
    )]
    Rest {
        /// What was asked for, without the axis.
        shape: MeshShape,
        /// The axis that takes the rest.
        axis: Axis,
        /// Ranks of the group.
        num_ranks: usize,
    },
}

impl Axis {
    /// All axes, the outermost first.
    pub const ALL: [Self; 5] = [Self::Pp, Self::Dp, Self::Shard, Self::Cp, Self::Tp];

    /// The axes along which samples are divided.
    pub const SAMPLES: &[Self] = &[Self::Dp, Self::Shard];

    /// The axes over which losses, counts and metrics are summed: ranks along `cp` share a sample's tokens.
    pub const LOSSES: &[Self] = &[Self::Dp, Self::Shard, Self::Cp];

    /// The axes along which ranks hold the same part of the training's state.
    pub const REPLICAS: &[Self] = &[Self::Dp, Self::Cp];

    /// The axes along which the model is cut.
    pub const MODEL: &[Self] = &[Self::Pp, Self::Tp];

    /// The name that configurations and errors use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pp => "pp",
            Self::Dp => "dp",
            Self::Shard => "shard",
            Self::Cp => "cp",
            Self::Tp => "tp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no axis.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no axis is called `{0}`; try pp, dp, shard, cp or tp")]
pub struct NoSuchAxis(String);

impl FromStr for Axis {
    type Err = NoSuchAxis;

    fn from_str(text: &str) -> Result<Self, NoSuchAxis> {
        Self::ALL.into_iter().find(|axis| axis.name() == text).ok_or_else(|| NoSuchAxis(text.into()))
    }
}

impl Default for MeshShape {
    fn default() -> Self {
        Self { sizes: [1; Axis::ALL.len()] }
    }
}

/// The axes that have more than one rank: `pp 2 × tp 4`.
impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Axis::ALL.into_iter().filter(|&axis| self.size(axis) != 1);
        let sizes: Vec<String> = axes.map(|axis| format!("{axis} {}", self.size(axis))).collect();
        f.write_str(if sizes.is_empty() { "of one rank".into() } else { sizes.join(" × ") }.as_str())
    }
}

impl MeshShape {
    /// The same shape with another size along one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, size: usize) -> Self {
        self.sizes[axis as usize] = size;
        self
    }

    /// The same shape with as many ranks along `axis` as `num_ranks` allows.
    pub fn with_rest(self, axis: Axis, num_ranks: usize) -> Result<Self, ShapeError> {
        let shape = self.with(axis, 1);
        match num_ranks.checked_div(shape.num_ranks()) {
            Some(rest) if rest * shape.num_ranks() == num_ranks && rest > 0 => Ok(shape.with(axis, rest)),
            _ => Err(ShapeError::Rest { shape, axis, num_ranks }),
        }
    }

    /// An error unless the mesh has this number of ranks.
    pub fn check(&self, num_ranks: usize) -> Result<(), ShapeError> {
        if self.num_ranks() == num_ranks {
            return Ok(());
        }
        Err(ShapeError::Product { shape: *self, num_ranks })
    }

    /// The number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// The number of ranks in every group along these axes together.
    pub fn size_of(&self, axes: &[Axis]) -> usize {
        let is_one_of = |axis: &Axis| axes.contains(axis);
        Axis::ALL.into_iter().filter(is_one_of).map(|axis| self.size(axis)).fold(1, usize::saturating_mul)
    }

    /// The number of all ranks.
    pub fn num_ranks(&self) -> usize {
        self.size_of(&Axis::ALL)
    }

    /// A rank's index along an axis.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// A rank's index among its [`peers`](Self::peers) along these axes.
    pub fn index(&self, rank: usize, axes: &[Axis]) -> usize {
        let axes = Axis::ALL.into_iter().filter(|axis| axes.contains(axis));
        axes.fold(0, |index, axis| index * self.size(axis) + self.coordinate(rank, axis))
    }

    /// The ranks that differ from `rank` along these axes only, itself included, in ascending order.
    pub fn peers(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let others = |axis: &Axis| !axes.contains(axis);
        let is_peer = |other: &usize| {
            let mut fixed = Axis::ALL.into_iter().filter(others);
            fixed.all(|axis| self.coordinate(*other, axis) == self.coordinate(rank, axis))
        };
        (0..self.num_ranks()).filter(is_peer).collect()
    }

    /// A rank's coordinates along the axes that have more than one rank: `pp 1, dp 0, tp 1`. Empty for a mesh of one rank.
    pub fn place(&self, rank: usize) -> String {
        let axes = Axis::ALL.into_iter().filter(|&axis| self.size(axis) > 1);
        let places: Vec<String> =
            axes.map(|axis| format!("{axis} {}", self.coordinate(rank, axis))).collect();
        places.join(", ")
    }

    /// The distance between two ranks that are neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        self.size_of(&Axis::ALL[axis as usize + 1..])
    }
}

/// All divisors of a number of ranks, as text.
fn divisors(number: usize) -> String {
    let divisors = (1..=number).filter(|divisor| number.is_multiple_of(*divisor));
    divisors.map(|divisor| divisor.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shapes() -> impl Strategy<Value = MeshShape> {
        prop::array::uniform5(1usize..4).prop_map(|sizes| MeshShape { sizes })
    }

    fn slices() -> impl Strategy<Value = Vec<Axis>> {
        prop::sample::subsequence(Axis::ALL.to_vec(), 0..=Axis::ALL.len()).prop_shuffle()
    }

    proptest! {
        #[test]
        fn every_rank_is_in_exactly_one_group_of_each_slice(shape in shapes(), axes in slices()) {
            for rank in 0..shape.num_ranks() {
                let peers = shape.peers(rank, &axes);
                prop_assert_eq!(peers.len(), shape.size_of(&axes));
                prop_assert!(peers.is_sorted());
                prop_assert_eq!(peers[shape.index(rank, &axes)], rank);
                for &peer in &peers {
                    prop_assert_eq!(&shape.peers(peer, &axes), &peers);
                }
            }
        }

        #[test]
        fn coordinates_are_those_of_one_rank_only(shape in shapes()) {
            let of = |rank| Axis::ALL.map(|axis| shape.coordinate(rank, axis));
            let all: std::collections::HashSet<_> = (0..shape.num_ranks()).map(of).collect();
            prop_assert_eq!(all.len(), shape.num_ranks());
            for coordinates in all {
                let rank = coordinates.iter().zip(shape.sizes).fold(0, |rank, (at, size)| rank * size + at);
                prop_assert_eq!(of(rank), coordinates);
            }
        }

        #[test]
        fn two_slices_that_share_no_axis_meet_in_one_rank(shape in shapes(), axes in slices(), cut in 0usize..6) {
            let (one, other) = axes.split_at(cut.min(axes.len()));
            for rank in 0..shape.num_ranks() {
                let others = shape.peers(rank, other);
                let common = shape.peers(rank, one).into_iter().filter(|peer| others.contains(peer));
                prop_assert_eq!(common.collect::<Vec<_>>(), [rank]);
            }
        }

        #[test]
        fn the_rest_fills_the_group_or_cannot(shape in shapes(), num_ranks in 0usize..200) {
            for axis in Axis::ALL {
                let fixed = shape.with(axis, 1).num_ranks();
                match shape.with_rest(axis, num_ranks) {
                    Ok(filled) => prop_assert!(filled.check(num_ranks).is_ok() && num_ranks > 0),
                    Err(_) => prop_assert!(num_ranks == 0 || num_ranks % fixed != 0),
                }
            }
        }
    }

    #[test]
    fn a_shape_that_does_not_fit_lists_the_divisors() {
        let shape = MeshShape::default().with(Axis::Pp, 2).with(Axis::Tp, 3);
        assert_eq!(
            shape.check(8).unwrap_err().to_string(),
            "the mesh pp 2 × tp 3 has 6 ranks, the group has 8; try sizes whose product is 8: its divisors are 1, 2, 4, 8"
        );
        assert!(shape.check(6).is_ok());
        let error = shape.with_rest(Axis::Dp, 8).unwrap_err().to_string();
        assert!(error.contains("so that dp cannot take the rest") && error.contains("1, 2, 4, 8"), "{error}");
        assert_eq!(shape.with_rest(Axis::Dp, 24).map(|shape| shape.size(Axis::Dp)), Ok(4));
        assert!(shape.with(Axis::Cp, 0).check(6).is_err(), "nobody");
        assert!(MeshShape::default().with(Axis::Cp, 0).with_rest(Axis::Dp, 6).is_err());
    }

    #[test]
    fn axes_have_their_names() {
        assert!(Axis::ALL.iter().all(|axis| axis.name().parse() == Ok(*axis)));
        let error = "ep".parse::<Axis>().unwrap_err().to_string();
        assert!(error.contains("`ep`") && error.contains("shard"), "{error}");
    }
}
