//! The ranks along `cp`, and which places of a text each has.

use drumline_comm::{Axis, Mesh, ProcessGroup};
use tch::Tensor;

use super::zigzag::ZigZag;
use crate::error::ParallelError;

/// The ranks along `cp`, each with some places of the same texts. Cheap to clone; clones are the same.
#[derive(Debug, Clone, Default)]
pub struct ContextParallel {
    group: Option<ProcessGroup>,
}

impl ContextParallel {
    /// The ranks of `group`.
    pub fn new(group: &ProcessGroup) -> Self {
        Self { group: (group.size() > 1).then(|| group.clone()) }
    }

    /// The ranks along `cp` of a mesh.
    pub fn on(mesh: &Mesh) -> Self {
        Self::new(mesh.axis(Axis::Cp))
    }

    /// One rank, which has all places.
    pub fn alone() -> Self {
        Self::default()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }

    /// This rank's index.
    pub fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, ProcessGroup::rank)
    }

    /// Whether there are several ranks.
    pub fn is_cut(&self) -> bool {
        self.group.is_some()
    }

    pub(super) fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_ref()
    }

    /// The cut of texts with this many places.
    pub fn cut(&self, len: i64) -> ZigZag {
        ZigZag::new(len, self.size())
    }

    /// This rank's places of a tensor that has all along `dim`: tokens, targets (shifted before they are cut), positions.
    pub fn own(&self, whole: &Tensor, dim: i64) -> Result<Tensor, ParallelError> {
        let len = whole.size().get(dim as usize).copied();
        let len = len.ok_or_else(|| ParallelError::value("the dim of places", dim, "one of the tensor's"))?;
        Ok(self.cut(len).part_of(whole, dim, self.rank())?)
    }
}
