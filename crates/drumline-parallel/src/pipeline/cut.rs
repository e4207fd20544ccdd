//! Which rank has which layers, and how it builds them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_plan::pipeline::{Action, Compute, Program, StageMap, partition};
use drumline_torch::WeightGrads;
use tch::Device;
use tch::nn::VarStore;

use super::build::Shared;
use super::error::PipelineError;
use super::layer::{LayerList, Tie};
use super::options::PipelineOptions;
use super::plan::{Order, Plan};
use super::torch::{Built, Stage};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// A model that is cut into stages, as one rank sees it.
pub(super) struct Cut {
    /// Which rank of the order holds which stage.
    pub(super) map: StageMap,
    /// The layers of each stage.
    pub(super) layers: Vec<Range<usize>>,
    /// The ranks of the order.
    pub(super) ranks: usize,
    /// The programs of a step and of an evaluation.
    pub(super) plans: [Arc<Plan>; 2],
    /// The stages of this rank.
    own: Vec<usize>,
    /// Whether this rank has all stages.
    is_alone: bool,
}

impl Cut {
    /// Decides it; an error for what cannot be.
    pub(super) fn new(layers: &LayerList, pp: &ProcessGroup, options: &PipelineOptions) -> Result<Self> {
        let PipelineOptions { order, ranks, micro_batches, costs, .. } = options;
        let ranks = ranks.unwrap_or(match order {
            Order::Program(program) => program.stages.num_ranks(),
            Order::Schedule { .. } => pp.size(),
        });
        let is_alone = pp.size() == 1;
        if pp.size() != ranks && !is_alone {
            return Err(PipelineError::Ranks { program: ranks, mesh: pp.size() }.into());
        }
        let costs = costs.clone().unwrap_or_else(|| layers.costs());
        if costs.len() != layers.len() {
            let expected = format!("{}, one for each layer", layers.len());
            return Err(ParallelError::value("the number of costs", costs.len(), expected));
        }
        let map = order.stages(ranks);
        let cut = partition(&costs, map.num_stages()).map_err(PipelineError::from)?;
        let plans = plans(order, ranks, *micro_batches, pp.size())?;
        let is_own = |stage: &usize| is_alone || map.rank_of(*stage) == pp.rank();
        let own = (0..map.num_stages()).filter(is_own).collect();
        Ok(Self { map, layers: cut, ranks, plans, own, is_alone })
    }

    /// Builds the stages of this rank. Their variables are in one store, whatever their devices: in `store`, if one is given.
    pub(super) fn build(
        &self,
        layers: &LayerList,
        store: Option<&VarStore>,
        options: &PipelineOptions,
    ) -> Result<(VarStore, HashMap<usize, Stage>)> {
        let usual = store.map_or(Device::Cpu, VarStore::device);
        let device_of = |stage: usize| options.device_of(stage, &self.map, usual);
        let first = self.own.first().map_or(Ok(usual), |&stage| device_of(stage))?;
        let store = match store {
            Some(_) if first != usual => {
                let expected = format!("{usual:?}, that of the store; try no devices");
                return Err(ParallelError::value("the device of a stage", format!("{first:?}"), expected));
            }
            Some(store) => on_device(store, usual),
            None => VarStore::new(first),
        };
        let _generator = Shared::generator(options.first_values)?;
        let shared = Shared::new(&store, &layers.ties, options.first_values);
        let mut stages = HashMap::new();
        for (stage, range) in self.layers.iter().enumerate() {
            let specs = &layers.layers[range.clone()];
            if !self.own.contains(&stage) {
                specs.iter().try_for_each(|spec| shared.skip(spec))?;
                continue;
            }
            let device = device_of(stage)?;
            let view = on_device(&store, device);
            let shared = shared.on(&view);
            let built = specs.iter().map(|spec| Ok(Built::new(spec, shared.build(spec)?)));
            let layers = built.collect::<Result<_>>()?;
            let weight_grads = is_split(self.plans[0].program(), stage).then(WeightGrads::default);
            stages.insert(stage, Stage { device, layers, weight_grads });
        }
        Ok((store, stages))
    }

    /// The ranks that have layers of a tie, in order.
    pub(super) fn holders(&self, layers: &LayerList, tie: &Tie) -> Vec<usize> {
        if self.is_alone {
            return vec![0];
        }
        let has = |stage: &usize| {
            layers.layers[self.layers[*stage].clone()].iter().any(|spec| tie.layers.contains(&spec.name))
        };
        let stages = (0..self.layers.len()).filter(has);
        let mut ranks: Vec<usize> = stages.map(|stage| self.map.rank_of(stage)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

/// The same variables, with new ones on another device.
fn on_device(store: &VarStore, device: Device) -> VarStore {
    let mut view = VarStore::new(device);
    view.variables_ = store.variables_.clone();
    view
}

/// The programs of a step and of an evaluation, for a single rank if it has all stages.
pub(super) fn plans(order: &Order, ranks: usize, micro_batches: usize, pp: usize) -> Result<[Arc<Plan>; 2]> {
    let plan = order.plan(ranks, micro_batches)?;
    let plan = if pp == 1 && ranks > 1 { plan.on_one_rank()? } else { plan };
    let forward = plan.forward_only()?;
    Ok([Arc::new(plan), Arc::new(forward)])
}

/// Whether a program computes the weight gradients of a stage apart.
fn is_split(program: &Program, stage: usize) -> bool {
    let works = program.rows.iter().flatten().flat_map(|action: &Action| action.works());
    works.into_iter().any(|work| work.stage == stage && work.compute == Compute::Input)
}
