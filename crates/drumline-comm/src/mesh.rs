//! A mesh: the ranks of a group along named axes, and a group for each axis.
//!
//! ```text
//!   group of 8 ──▶ Mesh (dp 4 × tp 2) ──┬─▶ axis(Tp)    2 ranks: halves of a matrix
//!                                       ├─▶ axis(Dp)    4 ranks: replicas
//!                                       ├─▶ samples()   dp × shard: ranks that read different samples
//!                                       └─▶ losses()    dp × shard × cp: ranks over which losses and counts are summed
//! ```
//! The groups are made once, with the mesh. Errors then name each rank with its place: "rank 3 (dp 1, tp 1)".

mod shape;

pub use shape::{Axis, MeshShape, NoSuchAxis, ShapeError};

use crate::error::CommError;
use crate::group::ProcessGroup;

/// The ranks of a group along named axes.
///
/// ```
/// use drumline_comm::{Axis, LocalGroup, Mesh, MeshShape, ReduceOp};
///
/// LocalGroup::run(4, |group| {
///     let mesh = Mesh::new(&group, MeshShape::default().with(Axis::Dp, 2).with(Axis::Tp, 2))?;
///     let mut sum = [group.rank() as u64];
///     mesh.axis(Axis::Tp).all_reduce(&mut sum, ReduceOp::Sum)?;
///     assert_eq!(sum, [if mesh.coordinate(Axis::Dp) == 0 { 1 } else { 5 }]);
///     Ok(())
/// })?;
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    shape: MeshShape,
    whole: ProcessGroup,
    /// The groups, each with those of its axes that have more than one rank.
    slices: Vec<(Vec<Axis>, ProcessGroup)>,
}

impl Mesh {
    /// Arranges the ranks of `group`, and makes the groups along each axis. All ranks of the group call it with the same
    /// shape. An error if the sizes do not multiply to the number of ranks.
    #[track_caller]
    pub fn new(group: &ProcessGroup, shape: MeshShape) -> Result<Self, CommError> {
        shape.check(group.size()).map_err(|error| CommError::invalid(error.to_string()))?;
        // Along one axis a rank's place is its number.
        if Axis::ALL.into_iter().filter(|&axis| shape.size(axis) > 1).count() > 1 {
            group.name_places(shape);
        }
        let mut mesh = Self { shape, whole: group.clone(), slices: Vec::new() };
        let axes = Axis::ALL.each_ref().map(std::slice::from_ref);
        for axes in axes.into_iter().chain([Axis::SAMPLES, Axis::LOSSES, Axis::REPLICAS, Axis::MODEL]) {
            mesh.make(axes)?;
        }
        Ok(mesh)
    }

    /// All ranks along one axis.
    #[track_caller]
    pub fn along(group: &ProcessGroup, axis: Axis) -> Result<Self, CommError> {
        Self::new(group, MeshShape::default().with(axis, group.size()))
    }

    /// The number of ranks along each axis.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// The group that the mesh was made of.
    pub fn whole(&self) -> &ProcessGroup {
        &self.whole
    }

    /// This rank's index along an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(self.whole.rank(), axis)
    }

    /// This rank and those that differ from it along this axis only.
    pub fn axis(&self, axis: Axis) -> &ProcessGroup {
        self.slice(&[axis])
    }

    /// The ranks among which samples are divided: `dp × shard`.
    pub fn samples(&self) -> &ProcessGroup {
        self.slice(Axis::SAMPLES)
    }

    /// The ranks over which losses, counts and metrics are summed: `dp × shard × cp`.
    pub fn losses(&self) -> &ProcessGroup {
        self.slice(Axis::LOSSES)
    }

    /// The ranks that hold the same part of the training's state: `dp × cp`.
    pub fn replicas(&self) -> &ProcessGroup {
        self.slice(Axis::REPLICAS)
    }

    /// The ranks among which the model is cut: `pp × tp`.
    pub fn model(&self) -> &ProcessGroup {
        self.slice(Axis::MODEL)
    }

    fn slice(&self, axes: &[Axis]) -> &ProcessGroup {
        let wanted = self.longer_than_one(axes);
        let found = self.slices.iter().find(|(axes, _)| *axes == wanted);
        found.map(|(_, group)| group).expect("every axis and named slice was made with the mesh")
    }

    /// Makes the group of these axes. Axes that select the same ranks share one group; this is the same on every rank.
    fn make(&mut self, axes: &[Axis]) -> Result<(), CommError> {
        let axes = self.longer_than_one(axes);
        if self.slices.iter().any(|(made, _)| *made == axes) {
            return Ok(());
        }
        let group = if self.shape.size_of(&axes) == self.whole.size() {
            self.whole.clone()
        } else {
            let peers = self.shape.peers(self.whole.rank(), &axes);
            let color =
                u32::try_from(peers[0]).map_err(|_| CommError::invalid("too many ranks for a mesh"))?;
            let group = self.whole.split(Some(color), 0)?;
            group.ok_or_else(|| CommError::invalid("a rank of the mesh was given no group"))?
        };
        self.slices.push((axes, group));
        Ok(())
    }

    fn longer_than_one(&self, axes: &[Axis]) -> Vec<Axis> {
        axes.iter().copied().filter(|&axis| self.shape.size(axis) > 1).collect()
    }
}
