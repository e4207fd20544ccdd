//! Sharded data parallelism, as ZeRO and FSDP: ranks divide the states of a training among them.
//!
//! ```text
//!                 parameters        gradients            optimizer's state
//!   stage 1       on each rank      on each rank         own rows
//!   stage 2       on each rank      own rows             own rows
//!   stage 3       one copy a node   own rows             own rows          on GPUs: own rows of parameters
//!
//!   backward ─▶ unit ready ─▶ reduce-scatter: each rank its rows ─▶ norm of all ─▶ step of own rows ─▶ rows of all visible
//! ```
//! Parameters are divided by whole rows (all elements with one index along dim 0), so that checkpoints hold
//! rectangles. With several replicas (`dp` beside `shard`), each is divided among its own ranks.
//!
//! Read in this order: `unit.rs`, `weights.rs`, `unit_grads.rs`, `grads.rs`, `engine.rs`; for GPUs `residency.rs` and
//! `gathered.rs`. The layout of a unit is `drumline-plan`'s.

mod accumulation;
mod engine;
mod gathered;
mod grads;
mod groups;
mod lane_jobs;
mod residency;
mod unit;
mod unit_grads;
mod weights;

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use drumline_comm::{Axis, MeshShape, ShapeError, call_site, on_behalf_of};
use drumline_plan::{Placement, Stage};
use drumline_torch::{Named, PAGE, SwapFile};
use tch::Device;

use crate::ddp::DdpOptions;
use crate::engine::{Alone, Engine, EngineOptions, EngineSetup, Placed, move_to};
use crate::error::ParallelError;
use crate::observer::{ReductionObserver, Watch, both};
use crate::offload::{Offload, agree};
use crate::sync_group::SyncGroup;
use crate::synced::{ModelTensors, Synced, SyncedSetup, broadcast_tensors};
pub use accumulation::Accumulation;
use accumulation::Choice;
use engine::{Shape, Sharded};
use gathered::Gatherer;
use grads::Kept;
use groups::Groups;
pub(crate) use unit::names_of_units;
use unit::{UnitPlan, plan_units};
use weights::{Copies, Held, InFile, Weights};

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Settings of sharded training.
pub struct ShardOptions {
    /// What is divided. Stage 0 is [`DdpOptions`].
    pub stage: Stage,
    /// The number of ranks that hold one copy of the states together, a divisor of the number of all ranks; by default
    /// all of them.
    pub shard: Option<usize>,
    /// How micro-batches are accumulated. By default [`All`](Accumulation::All) in stage 1, in which gradients are not
    /// divided; in stages 2 and 3 if whole gradients take at most a quarter of each rank's free memory, and otherwise
    /// [`OwnRows`](Accumulation::OwnRows).
    pub accumulation: Option<Accumulation>,
    /// Whether ranks hold only their own rows of parameters in stage 3, and gather the others' when an operation uses
    /// them. By default they do so on GPUs. On CPUs the ranks of a node have one copy together, which needs no gathering.
    pub gather_parameters: Option<bool>,
    /// Parameters of at most this many elements stay gathered where others are gathered when they are used; default
    /// 100,000. DeepSpeed's `stage3_param_persistence_threshold`.
    pub keep_gathered: usize,
    /// Whether a single rank divides, gathers and reduces as if there were several, to measure the cost.
    pub shards_alone: bool,
    /// What lies in files rather than in memory between its uses.
    pub offload: Offload,
    /// Whether a forward in training first broadcasts the buffers of rank 0.
    pub broadcast_buffers: bool,
    /// The group of the model's [`SyncBatchNorm`](crate::SyncBatchNorm) layers, if it has any.
    pub sync_group: Option<SyncGroup>,
    /// Names of parameters and buffers that are not synchronised: each rank trains them for itself, they do not count in
    /// the norm of all gradients, and those of rank 0 are saved.
    pub ignored: Vec<String>,
    /// Is called when a unit is reduced.
    pub observer: Option<Arc<dyn ReductionObserver>>,
}

impl ShardOptions {
    /// The defaults for a stage.
    pub fn new(stage: Stage) -> Self {
        Self {
            stage,
            shard: None,
            accumulation: None,
            gather_parameters: None,
            keep_gathered: 100_000,
            shards_alone: false,
            offload: Offload::default(),
            broadcast_buffers: true,
            sync_group: None,
            ignored: Vec::new(),
            observer: None,
        }
    }
}

impl std::fmt::Debug for ShardOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            stage,
            shard,
            accumulation,
            gather_parameters,
            keep_gathered,
            shards_alone,
            offload,
            broadcast_buffers,
            ignored,
            sync_group: _,
            observer: _,
        } = self;
        f.debug_struct("ShardOptions")
            .field("stage", stage)
            .field("shard", shard)
            .field("accumulation", accumulation)
            .field("gather_parameters", gather_parameters)
            .field("keep_gathered", keep_gathered)
            .field("shards_alone", shards_alone)
            .field("offload", offload)
            .field("broadcast_buffers", broadcast_buffers)
            .field("ignored", ignored)
            .finish_non_exhaustive()
    }
}

impl EngineOptions for ShardOptions {
    fn mesh_shape(&self, num_ranks: usize) -> std::result::Result<MeshShape, ShapeError> {
        let shard = self.shard.unwrap_or(num_ranks).max(1);
        let shape = MeshShape::default().with(Axis::Dp, num_ranks / shard).with(Axis::Shard, shard);
        shape.check(num_ranks)?;
        Ok(shape)
    }

    #[track_caller]
    fn engine(mut self: Box<Self>, setup: EngineSetup<'_>) -> Result<Box<dyn Engine>> {
        let EngineSetup { store, mesh, parts, device, observer } = setup;
        self.offload.check(device)?;
        if self.stage == Stage::Zero0 && self.offload.is_none() {
            let Self { broadcast_buffers, sync_group, ignored, observer: own, .. } = *self;
            let options =
                DdpOptions { broadcast_buffers, sync_group, ignored, observer: own, ..DdpOptions::default() };
            return Box::new(options).engine(EngineSetup { store, mesh, parts, device, observer });
        }
        if !matches!(device, Device::Cpu | Device::Cuda(_)) {
            return Err(ParallelError::UnsupportedDevice { device });
        }
        let has_rows_in_files = !self.offload.parameters.is_device();
        if has_rows_in_files && (self.stage != Stage::Zero3 || self.gather_parameters == Some(false)) {
            let expected = "in stage 3, in which ranks gather them; try Stage::Zero3";
            return Err(ParallelError::value("the place of parameters", "a file", expected));
        }
        if mesh.losses().size() == 1 && !self.shards_alone && !has_rows_in_files {
            return Ok(Box::new(Alone::on(device, store, mesh, parts)?.offloading(self.offload)));
        }
        if self.stage == Stage::Zero3 && mesh.axis(Axis::Pp).size() > 1 {
            let expected = "1 or 2: a rank keeps the parameters of its stages; try Stage::Zero2";
            return Err(ParallelError::value("the stage of ZeRO of a pipeline", 3, expected));
        }
        if self.stage == Stage::Zero0 {
            let expected = "1, 2 or 3, so that each rank offloads its own part";
            return Err(ParallelError::value(
                "the stage of ZeRO of a training that is offloaded",
                0,
                expected,
            ));
        }
        self.observer = both(self.observer.take(), observer);
        let setup = EngineSetup { store, mesh, parts, device, observer: None };
        on_behalf_of(call_site(), || Ok(Box::new(self.make(setup)?) as Box<dyn Engine>))
    }
}

impl ShardOptions {
    fn make(self, setup: EngineSetup<'_>) -> Result<Sharded> {
        let EngineSetup { store, mesh, parts, device, observer: _ } = setup;
        let groups = Groups::of(mesh)?;
        let tensors = ModelTensors::of(store, &self.ignored, &groups.all)?;
        let ModelTensors { params, frozen, buffers, aliases, ignored } = &tensors;
        let placements = self.stage.placements();
        let rows = self.offload.parameters.folder();
        let gathers = rows.is_some() || self.gather_parameters.unwrap_or(device != Device::Cpu);
        let copies = match placements.parameters {
            Placement::Replicated => Copies::OnEachRank,
            Placement::Sharded if gathers => Copies::WhenUsed,
            Placement::Sharded => Copies::OnEachNode,
        };
        let kept = match placements.gradients {
            Placement::Replicated => Kept::All,
            Placement::Sharded => Kept::OwnRows,
        };
        let whole = if copies == Copies::OnEachRank { frozen.clone() } else { Vec::new() };
        let is_divided = |name: &str| {
            let is_whole = whole.iter().any(|named| named.name == name);
            !is_whole && params.iter().chain(frozen).any(|named| named.name == name)
        };
        move_to(store, device, is_divided)?;
        let (held, keep) = (HeldBy { copies, device, rows }, self.keep_gathered);
        let weights = weights_of(&groups, params, &held, keep)?;
        let frozen_rows = match copies {
            Copies::OnEachNode | Copies::WhenUsed => weights_of(&groups, frozen, &held, keep)?,
            Copies::OnEachRank => {
                broadcast_tensors(&groups.all, frozen.clone())?;
                Vec::new()
            }
        };
        let is_first_replica = groups.replicas.rank() == 0;
        let mut state = placed_rows(&weights, params, is_first_replica);
        state.extend(placed_rows(&frozen_rows, frozen, is_first_replica));
        let is_first = groups.all.rank() == 0;
        state.extend(aliases.iter().flat_map(|alias| alias.placed(&state)).collect::<Vec<_>>());
        // Nobody owns rows of a parameter without elements.
        let divided = params.iter().chain(if frozen_rows.is_empty() { &[] } else { &frozen[..] });
        let empty: Vec<_> = divided.filter(|named| named.tensor.numel() == 0).cloned().collect();
        let on_each_rank = buffers.iter().chain(ignored).chain(&empty).cloned();
        let whole = whole.into_iter().chain(on_each_rank);
        state.extend(whole.map(|named| Placed::replicated(named, is_first)));
        let shapes = params.iter().map(|named| Shape::of(named, true));
        let shapes = shapes.chain(frozen.iter().map(|named| Shape::of(named, !frozen_rows.is_empty())));
        let shapes = shapes.chain(buffers.iter().chain(ignored).map(|named| Shape::of(named, false)));
        let mut shapes: Vec<_> = shapes.collect();
        shapes.extend(aliases.iter().flat_map(|alias| Shape::of_alias(alias, &shapes)).collect::<Vec<_>>());
        let watch = Watch(self.observer.clone());
        let reduction = grads::reducer(&groups, params.clone(), &weights, kept, watch)?;
        let gathered: Vec<_> = weights.iter().chain(&frozen_rows).filter_map(Weights::gathered).collect();
        let gatherer =
            if gathered.is_empty() { None } else { Some(Gatherer::new(&groups.gather, gathered, device)?) };
        let mut own = own_rows(&weights, params);
        let trained = empty.iter().chain(ignored).filter(|named| named.tensor.requires_grad());
        own.extend(trained.cloned());
        let ignored = ignored.iter().map(|named| named.name.clone()).collect();
        let accumulation = match (self.accumulation, placements.gradients) {
            (Some(given), _) => Choice::given(given),
            (None, Placement::Replicated) => Choice::given(Accumulation::All),
            (None, Placement::Sharded) => Choice::of(params, device, &groups.all)?,
        };
        let synced = Synced::new(SyncedSetup {
            group: groups.all.clone(),
            tensors,
            reduction: Some(Box::new(reduction)),
            broadcast_buffers: self.broadcast_buffers,
            sync_group: self.sync_group,
        })?;
        let (mesh, scratch) = (mesh.clone(), RefCell::new(None));
        Ok(Sharded {
            mesh,
            parts,
            groups,
            synced,
            accumulation,
            stage: self.stage,
            offload: self.offload,
            place: RefCell::default(),
            weights,
            frozen: frozen_rows,
            gatherer,
            own,
            ignored,
            state,
            shapes,
            scratch,
            device,
        })
    }
}

/// Where parameters are.
struct HeldBy<'a> {
    copies: Copies,
    device: Device,
    /// The folder of a file with this rank's rows.
    rows: Option<&'a Path>,
}

/// Moves parameters into the memory of units. Where they are gathered when they are used, those of at most `keep` elements
/// stay gathered.
fn weights_of(groups: &Groups, params: &[Named], held: &HeldBy<'_>, keep: usize) -> Result<Vec<Weights>> {
    let HeldBy { copies, device, rows } = held;
    let are_gathered = *copies == Copies::WhenUsed;
    let plans = plan_units(params, groups.shard.size(), are_gathered.then_some(keep));
    let stays = |plan: &UnitPlan| !are_gathered || plan.name.is_empty();
    let mut end = 0;
    let mut place = |plan: &UnitPlan| {
        let len = if stays(plan) { 0 } else { plan.layout.shard_len() * plan.kind.elt_size_in_bytes() };
        let begin = end;
        end += len.next_multiple_of(PAGE);
        begin..end
    };
    let places: Vec<_> = plans.iter().map(&mut place).collect();
    let file = rows.filter(|_| end > 0).map(|folder| {
        let made = SwapFile::new(folder, end as u64).map(Arc::new).map_err(ParallelError::from);
        agree(&groups.all, made)
    });
    let file = file.transpose()?;
    let weights = |(plan, bytes): (UnitPlan, Range<usize>)| {
        let copies = if are_gathered && stays(&plan) { Copies::OnEachRank } else { *copies };
        let file = file.clone().map(|file| InFile { file, bytes });
        Weights::new(groups, plan, params, Held { copies, device: *device, file })
    };
    plans.into_iter().zip(places).map(weights).collect()
}

/// The rows that this rank owns, with their places in whole tensors.
fn placed_rows(weights: &[Weights], params: &[Named], is_saved_here: bool) -> Vec<Placed> {
    let rows = weights.iter().flat_map(|unit| &unit.own);
    let placed = rows.map(|rows| {
        let Named { name, tensor } = &params[rows.param];
        let whole = tensor.size();
        let mut offsets = vec![0; whole.len()];
        if let Some(first) = offsets.first_mut() {
            *first = rows.first as i64;
        }
        let (name, boxes) = (name.clone(), Vec::new());
        Placed { name, tensor: rows.tensor.shallow_clone(), whole, offsets, is_saved_here, boxes }
    });
    placed.collect()
}

fn own_rows(weights: &[Weights], params: &[Named]) -> Vec<Named> {
    let mut rows: Vec<_> = weights.iter().flat_map(|unit| &unit.own).collect();
    rows.sort_by_key(|rows| rows.param);
    let named = rows
        .into_iter()
        .map(|rows| Named { name: params[rows.param].name.clone(), tensor: rows.tensor.shallow_clone() });
    named.collect()
}

#[cfg(test)]
mod tests {
    use drumline_comm::{LocalGroup, Mesh, Op, ProcessGroup};
    use drumline_plan::{Collective, StepTraffic};
    use drumline_torch::{Optimizer, Sgd, SgdOptions, parameters};
    use tch::nn::{Linear, Module, VarStore, linear};
    use tch::{Kind, Tensor};

    use super::*;
    use crate::engine::GradSync;

    const NUM_RANKS: usize = 4;
    const STEPS: usize = 3;

    struct Blocks(Vec<Linear>);

    impl Blocks {
        fn new(vs: &VarStore) -> Self {
            let block = |index: usize| linear(vs.root() / "h" / index, 24, 24, Default::default());
            Self((0..3).map(block).collect())
        }

        fn loss(&self) -> Tensor {
            let x = Tensor::ones([2, 24], (Kind::Float, Device::Cpu));
            self.0.iter().fold(x, |x, block| block.forward(&x).tanh()).square().mean(Kind::Float)
        }
    }

    /// The engine after some steps of two micro-batches each.
    fn trained(group: &ProcessGroup, options: ShardOptions) -> Sharded {
        let vs = VarStore::new(Device::Cpu);
        let model = Blocks::new(&vs);
        let mesh = Mesh::new(group, options.mesh_shape(group.size()).unwrap()).unwrap();
        let sharded = options.make(EngineSetup::new(&vs, &mesh)).unwrap();
        let mut optimizer = Sgd::new(parameters(&vs), SgdOptions::default()).unwrap();
        sharded.adopt(&mut optimizer).unwrap();
        for _ in 0..STEPS {
            optimizer.zero_grad().unwrap();
            for sync in [GradSync::Accumulate, GradSync::Reduce] {
                sharded.backward(&model.loss(), sync).unwrap();
            }
            sharded.step(&mut optimizer).unwrap();
        }
        sharded
    }

    /// Calls and elements in all steps, for a collective of the plan.
    fn planned(
        sharded: &Sharded,
        traffic: impl Fn(&drumline_plan::UnitLayout) -> Vec<StepTraffic>,
    ) -> Vec<[u64; 2]> {
        let mut planned = vec![[0; 2]; 2];
        for unit in &sharded.weights {
            for StepTraffic { collective, calls, sent } in traffic(&unit.plan.layout) {
                let place = usize::from(collective == Collective::AllGather);
                planned[place][0] += (calls * STEPS) as u64;
                // A rank sends all but its own part.
                planned[place][1] += (sent * STEPS * NUM_RANKS / (NUM_RANKS - 1)) as u64;
            }
        }
        planned
    }

    fn made(sharded: &Sharded) -> Vec<[u64; 2]> {
        let count = |op| sharded.groups.shard.call_count(op);
        [Op::ReduceScatter, Op::AllGather].map(count).map(|count| [count.calls, count.bytes / 4]).to_vec()
    }

    /// Prints the calls of a step and the bytes that a rank sends in them: a row of a table in docs/zero.md.
    fn print_row(name: &str, made: &[[u64; 2]]) {
        let of_step = made.iter().map(|[calls, elements]| {
            let sent = elements * 4 * (NUM_RANKS as u64 - 1) / NUM_RANKS as u64;
            format!(" {} | {} |", calls / STEPS as u64, sent / STEPS as u64)
        });
        println!("| {name} |{}", of_step.collect::<String>());
    }

    #[test]
    fn calls_and_bytes_are_those_of_the_plan() {
        LocalGroup::run(NUM_RANKS, |group| {
            tch::set_num_threads(1);
            for (stage, accumulation) in [
                (Stage::Zero1, Accumulation::All),
                (Stage::Zero2, Accumulation::OwnRows),
                (Stage::Zero2, Accumulation::All),
                (Stage::Zero3, Accumulation::OwnRows),
                (Stage::Zero3, Accumulation::All),
            ] {
                let options = ShardOptions { accumulation: Some(accumulation), ..ShardOptions::new(stage) };
                let sharded = trained(&group, options);
                // Gradients that are accumulated on each rank are reduced once.
                let num_reductions = if accumulation == Accumulation::All { 1 } else { 2 };
                let traffic = |unit: &_| match stage {
                    Stage::Zero3 => StepTraffic::of_node_shared(unit, num_reductions),
                    _ => StepTraffic::of(unit, stage, num_reductions),
                };
                let made = made(&sharded);
                assert_eq!(made, planned(&sharded, traffic), "{stage} {accumulation:?}");
                assert_eq!(made[1] == [0, 0], stage == Stage::Zero3, "nothing is gathered in stage 3");
                if group.rank() == 0 {
                    print_row(&format!("{stage}, `{accumulation:?}`"), &made);
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
