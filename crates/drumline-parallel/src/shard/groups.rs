//! The groups of a sharded model. They are its own, so that its calls cannot mix with those of the program.

use std::sync::Arc;

use drumline_comm::{Axis, Mesh, ProcessGroup};

use crate::error::ParallelError;

/// The ranks that train a model together.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// All of them: those that read different samples.
    pub(super) all: Arc<ProcessGroup>,
    /// Those among which the states are divided.
    pub(super) shard: Arc<ProcessGroup>,
    /// Those that own the same rows, one in each replica.
    pub(super) replicas: Arc<ProcessGroup>,
}

impl Groups {
    pub(super) fn of(mesh: &Mesh) -> Result<Self, ParallelError> {
        let own = |group| Ok::<_, ParallelError>(Arc::new(crate::own_group(group)?));
        Ok(Self {
            all: own(mesh.samples())?,
            shard: own(mesh.axis(Axis::Shard))?,
            replicas: own(mesh.axis(Axis::Dp))?,
        })
    }

    /// Ends all groups: this rank will not continue.
    pub(super) fn abort(&self, cause: &str) {
        for group in [&self.all, &self.shard, &self.replicas] {
            group.abort(cause);
        }
    }
}
