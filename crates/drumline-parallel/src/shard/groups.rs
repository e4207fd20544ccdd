//! The groups of a sharded model. They are its own, so that its calls cannot mix with those of the program.

use std::sync::Arc;

use drumline_comm::{Axis, Mesh, ProcessGroup};

use drumline_torch::TensorCollectives;

use crate::error::{NotRecordable, ParallelError};

/// The ranks that train a model together.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// All of them: those that average gradients.
    pub(super) all: Arc<ProcessGroup>,
    /// Those among which the states are divided.
    pub(super) shard: Arc<ProcessGroup>,
    /// The same, for gathers, which do not wait for reductions.
    pub(super) gather: Arc<ProcessGroup>,
    /// Those that own the same rows, one in each replica.
    pub(super) replicas: Arc<ProcessGroup>,
}

impl Groups {
    pub(super) fn of(mesh: &Mesh) -> Result<Self, ParallelError> {
        let own = |group| Ok::<_, ParallelError>(Arc::new(crate::own_group(group)?));
        Ok(Self {
            all: own(mesh.losses())?,
            shard: own(mesh.axis(Axis::Shard))?,
            gather: own(mesh.axis(Axis::Shard))?,
            replicas: own(mesh.replicas())?,
        })
    }

    /// An error that says why, if the collectives of a step on GPU tensors cannot be recorded in a CUDA graph.
    pub(super) fn are_recordable(&self) -> Result<(), NotRecordable> {
        self.shard.is_recordable()?;
        if self.replicas.size() > 1 {
            self.replicas.is_recordable()?;
        }
        Ok(())
    }

    /// Ends all groups: this rank will not continue.
    pub(super) fn abort(&self, cause: &str) {
        for group in [&self.all, &self.shard, &self.gather, &self.replicas] {
            group.abort(cause);
        }
    }
}
