//! How the ranks of a job train one model together: the one place where a program chooses its engine.

use drumline::ProcessGroup;
use drumline::comm::MeshShape;
use drumline::engine::{DdpOptions, EngineOptions, SyncGroup};

use crate::task::Place;

/// How ranks train one model together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parallelism {
    shape: MeshShape,
}

impl Parallelism {
    /// For the ranks of this group.
    pub(crate) fn of(group: &ProcessGroup) -> anyhow::Result<Self> {
        Ok(Self { shape: options(None).mesh_shape(group.size())? })
    }

    /// A rank's place among those that split the data.
    pub(crate) fn place(&self, rank: usize) -> Place {
        Place::on(&self.shape, rank)
    }

    /// The options of the engine of a model whose synchronised norms have this group.
    pub(super) fn engine(&self, sync_group: Option<SyncGroup>) -> Box<dyn EngineOptions> {
        options(sync_group)
    }
}

fn options(sync_group: Option<SyncGroup>) -> Box<dyn EngineOptions> {
    Box::new(DdpOptions { sync_group, ..DdpOptions::default() })
}
