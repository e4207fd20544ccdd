//! How the ranks of a job train one model together: the one place where a program chooses its engine.

use std::path::PathBuf;

use drumline::ProcessGroup;
use drumline::comm::{Axis, CommError, Mesh, MeshShape};
use drumline::engine::pipeline::{FirstValues, Order, PipelineOptions};
use drumline::engine::{DdpOptions, EngineOptions, ModelParallel, Part, ShardOptions, Stage, SyncGroup};
use tch::Device;

use crate::config::{Parallel, ReduceIn, SharedKeys};
use crate::first_weights::FirstWeights;
use crate::task::{PipelineCut, Place};

/// How ranks train one model together.
#[derive(Debug, Clone)]
pub(crate) struct Parallelism {
    keys: Parallel,
    /// The batches of a step on each rank.
    micro_batches: usize,
    out_dir: PathBuf,
    num_ranks: usize,
    shape: MeshShape,
}

impl Parallelism {
    /// For the ranks of this group, by the section `PARALLEL`.
    pub(crate) fn of(group: &ProcessGroup, keys: &SharedKeys) -> anyhow::Result<Self> {
        Self::with(group, keys.parallel.clone(), keys.micro_batches(), keys.run.out_dir.clone())
    }

    /// One rank, which has all of the model.
    pub(crate) fn alone(group: &ProcessGroup) -> anyhow::Result<Self> {
        Self::with(group, Parallel::default(), 1, PathBuf::new())
    }

    fn with(
        group: &ProcessGroup,
        keys: Parallel,
        micro_batches: usize,
        out_dir: PathBuf,
    ) -> anyhow::Result<Self> {
        let num_ranks = group.size();
        let mut parallelism = Self { keys, micro_batches, out_dir, num_ranks, shape: MeshShape::default() };
        parallelism.shape = parallelism.engine(None, Vec::new())?.mesh_shape(num_ranks)?;
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

    /// The mesh of a model that is cut among ranks; `None` for one that is not. All ranks call it.
    #[track_caller]
    pub(super) fn mesh(&self, group: &ProcessGroup) -> Result<Option<Mesh>, CommError> {
        self.keys.is_cut().then(|| Mesh::new(group, self.shape)).transpose()
    }

    /// How the model is cut into stages, if it is, whose first weights are those of this seed.
    pub(super) fn pipeline(&self, mesh: Option<&Mesh>, seed: u64) -> Option<PipelineCut> {
        let mesh = mesh.filter(|_| self.keys.pp > 1)?.clone();
        let order = Order::Schedule { schedule: self.keys.schedule, chunks: self.keys.chunks() };
        let (micro_batches, first_values) = (self.micro_batches, FirstValues::OfModel(seed));
        let options = PipelineOptions { order, micro_batches, first_values, ..PipelineOptions::default() };
        Some(PipelineCut { mesh, options })
    }

    /// The ranks among which samples are divided.
    pub(super) fn num_replicas(&self) -> usize {
        self.shape.size_of(Axis::SAMPLES)
    }

    /// What a rank does with first weights. An engine that divides them gives all ranks with the same part of the model
    /// those of the first of them.
    pub(super) fn first_weights(&self, rank: usize) -> FirstWeights {
        let has_own = self.keys.zero == Stage::Zero0 || self.shape.size_of(Axis::LOSSES) == 1;
        if has_own { FirstWeights::Own } else { FirstWeights::of_rank(self.shape.index(rank, Axis::LOSSES)) }
    }

    /// Where a model that trains on `device` is created. If ranks divide its parameters, it is never whole on a GPU.
    pub(super) fn first_device(&self, device: Device) -> Device {
        let is_divided = self.keys.zero == Stage::Zero3 && self.shape.size_of(Axis::LOSSES) > 1;
        if is_divided { Device::Cpu } else { device }
    }

    /// The options of the engine of a model whose synchronised norms have this group, and of which this rank has these
    /// parts.
    pub(super) fn engine(
        &self,
        sync_group: Option<SyncGroup>,
        parts: Vec<Part>,
    ) -> anyhow::Result<Box<dyn EngineOptions>> {
        let within: Box<dyn EngineOptions> = match self.keys.shard_options(self.num_ranks, &self.out_dir)? {
            Some(options) => ShardOptions { sync_group, ..options }.into(),
            None => {
                let usual = DdpOptions::default();
                let hook = self.keys.reduce_in.map_or(usual.hook, ReduceIn::hook);
                DdpOptions { sync_group, hook, ..DdpOptions::default() }.into()
            }
        };
        let Parallel { pp, tp, cp, .. } = self.keys;
        if self.keys.is_cut() {
            return Ok(ModelParallel { pp, tp, cp, parts, within }.into());
        }
        Ok(within)
    }
}
