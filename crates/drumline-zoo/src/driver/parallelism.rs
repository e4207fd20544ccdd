//! How the ranks of a job train one model together: the one place where a program chooses its engine.

use std::path::PathBuf;

use drumline::ProcessGroup;
use drumline::comm::{Axis, MeshShape};
use drumline::engine::{DdpOptions, EngineOptions, ShardOptions, Stage, SyncGroup};
use tch::Device;

use crate::config::{Parallel, ReduceIn, SharedKeys};
use crate::first_weights::FirstWeights;
use crate::task::Place;

/// How ranks train one model together.
#[derive(Debug, Clone)]
pub(crate) struct Parallelism {
    keys: Parallel,
    out_dir: PathBuf,
    num_ranks: usize,
    shape: MeshShape,
}

impl Parallelism {
    /// For the ranks of this group, by the section `PARALLEL`.
    pub(crate) fn of(group: &ProcessGroup, keys: &SharedKeys) -> anyhow::Result<Self> {
        Self::with(group, keys.parallel.clone(), keys.run.out_dir.clone())
    }

    /// One rank, which has all of the model.
    pub(crate) fn alone(group: &ProcessGroup) -> anyhow::Result<Self> {
        Self::with(group, Parallel::default(), PathBuf::new())
    }

    fn with(group: &ProcessGroup, keys: Parallel, out_dir: PathBuf) -> anyhow::Result<Self> {
        let num_ranks = group.size();
        let mut parallelism = Self { keys, out_dir, num_ranks, shape: MeshShape::default() };
        parallelism.shape = parallelism.engine(None)?.mesh_shape(num_ranks)?;
        Ok(parallelism)
    }

    /// A rank's place among those that split the data.
    pub(crate) fn place(&self, rank: usize) -> Place {
        Place::on(&self.shape, rank)
    }

    /// Whether ranks divide the training's state among them.
    pub(super) fn is_divided(&self) -> bool {
        self.shape.num_ranks() > self.shape.size(Axis::Dp)
    }

    /// What a rank does with first weights. An engine that divides them gives all ranks those of rank 0.
    pub(super) fn first_weights(&self, rank: usize) -> FirstWeights {
        let has_own = self.keys.zero == Stage::Zero0 || self.num_ranks == 1;
        if has_own { FirstWeights::Own } else { FirstWeights::of_rank(rank) }
    }

    /// Where a model that trains on `device` is created. If ranks divide its parameters, it is never whole on a GPU.
    pub(super) fn first_device(&self, device: Device) -> Device {
        let is_divided = self.keys.zero == Stage::Zero3 && self.num_ranks > 1;
        if is_divided { Device::Cpu } else { device }
    }

    /// The options of the engine of a model whose synchronised norms have this group.
    pub(super) fn engine(&self, sync_group: Option<SyncGroup>) -> anyhow::Result<Box<dyn EngineOptions>> {
        Ok(match self.keys.shard_options(self.num_ranks, &self.out_dir)? {
            Some(options) => ShardOptions { sync_group, ..options }.into(),
            None => {
                let usual = DdpOptions::default();
                let hook = self.keys.reduce_in.map_or(usual.hook, ReduceIn::hook);
                DdpOptions { sync_group, hook, ..DdpOptions::default() }.into()
            }
        })
    }
}
