//! `Stages`: what a rank has of a model that is cut by its layers.
//!
//! ```text
//!   LayerList ─ cut by cost ─▶ layers of each stage ─▶ those of this rank, built ─▶ Pipeline: steps and evaluations
//! ```
//! A model of a training loop holds its stages, and a [`Pipeline`](super::Pipeline) runs them. Not here: steps (`engine`).

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use drumline_comm::{Axis, Mesh};
use drumline_plan::pipeline::{Program, StageMap};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;

use super::cut::{Cut, plans};
use super::error::PipelineError;
use super::layer::{LayerList, Mode};
use super::options::PipelineOptions;
use super::plan::{Order, Plan};
use super::ties::Ties;
use super::torch::Stage;
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The stages of a rank, with the plan of all ranks.
pub struct Stages {
    mesh: Mesh,
    store: VarStore,
    pub(super) own: HashMap<usize, Stage>,
    layers: Vec<Range<usize>>,
    map: StageMap,
    order: Order,
    ranks: usize,
    /// The micro-batches of a usual step.
    micro_batches: usize,
    /// By the number of micro-batches, for training and for evaluation.
    plans: RefCell<HashMap<usize, [Arc<Plan>; 2]>>,
    pub(super) ties: Ties,
    /// The names of the variables that only other ranks have.
    elsewhere: BTreeSet<String>,
}

impl std::fmt::Debug for Stages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stages")
            .field("map", &self.map)
            .field("layers", &self.layers)
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

impl Stages {
    /// Cuts a model, and builds the layers of this rank in `store`. All ranks of the mesh call it with the same layers and
    /// options. Of these, `masks`, `autocast`, `parts` and `within` are for [`Pipeline::new`](super::Pipeline::new) only: a
    /// training loop has its own.
    #[track_caller]
    pub fn build(
        layers: &LayerList,
        store: &VarStore,
        mesh: &Mesh,
        options: &PipelineOptions,
    ) -> Result<Self> {
        Self::build_in(Some(store), layers, mesh, options)
    }

    /// The same with variables in `store`, or in one of their own.
    #[track_caller]
    pub(super) fn build_in(
        store: Option<&VarStore>,
        layers: &LayerList,
        mesh: &Mesh,
        options: &PipelineOptions,
    ) -> Result<Self> {
        let pp = mesh.axis(Axis::Pp);
        let cut = Cut::new(layers, pp, options)?;
        let built = cut.build(layers, store, options);
        let ((store, own), names) = check_built(mesh, cut.plans[0].program(), &cut.layers, built)?;
        let ties = Ties::new(pp, &store, &layers.ties, |tie| cut.holders(layers, tie))?;
        let Cut { map, layers, ranks, plans, .. } = cut;
        let micro_batches = options.micro_batches;
        Ok(Self {
            mesh: mesh.clone(),
            store,
            own,
            layers,
            map,
            order: options.order.clone(),
            ranks,
            micro_batches,
            plans: HashMap::from([(micro_batches, plans)]).into(),
            ties,
            elsewhere: names,
        })
    }

    /// The ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The variables of this rank's stages, with the names of the whole model.
    pub fn store(&self) -> &VarStore {
        &self.store
    }

    /// The names of the variables that only other ranks have.
    pub fn elsewhere(&self) -> &BTreeSet<String> {
        &self.elsewhere
    }

    /// The layers of each stage.
    pub fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Which rank holds which stage.
    pub fn map(&self) -> &StageMap {
        &self.map
    }

    /// The micro-batches of a usual step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Whether this rank gets the inputs of micro-batches.
    pub fn has_first_stage(&self) -> bool {
        self.own.contains_key(&0)
    }

    /// Whether this rank computes the loss.
    pub fn has_last_stage(&self) -> bool {
        self.own.contains_key(&(self.layers.len() - 1))
    }

    /// Whether what this rank computes of losses counts: it computes them, and no other rank of its samples does.
    pub fn counts_losses(&self) -> bool {
        self.has_last_stage() && self.mesh.coordinate(Axis::Tp) == 0
    }

    /// The plan of a step with this many micro-batches.
    pub fn plan(&self, micro_batches: usize) -> Result<Arc<Plan>> {
        self.plan_for(micro_batches, Mode::Train)
    }

    pub(super) fn plan_for(&self, micro_batches: usize, mode: Mode) -> Result<Arc<Plan>> {
        let place = usize::from(!mode.is_train());
        if let Some(found) = self.plans.borrow().get(&micro_batches) {
            return Ok(found[place].clone());
        }
        let order = self.order.for_rest(self.ranks, micro_batches);
        let made = plans(&order, self.ranks, micro_batches, self.mesh.axis(Axis::Pp).size())?;
        let plan = made[place].clone();
        self.plans.borrow_mut().insert(micro_batches, made);
        Ok(plan)
    }
}

type Built = (VarStore, HashMap<usize, Stage>);

/// What a rank says of what it has built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Told {
    program: u64,
    /// The last layer of each stage.
    ends: Vec<u64>,
    /// Names of variables, or why there are none.
    variables: std::result::Result<Vec<String>, String>,
}

/// What was built, with the names of what only other ranks have built; an error unless all ranks have built their stages,
/// with the same program and the same cut.
#[track_caller]
fn check_built(
    mesh: &Mesh,
    program: &Program,
    cut: &[Range<usize>],
    built: Result<Built>,
) -> Result<(Built, BTreeSet<String>)> {
    let ends: Vec<_> = cut.iter().map(|range| range.end as u64).collect();
    let names = |(store, _): &Built| store.variables().into_keys().collect::<Vec<_>>();
    let variables = built.as_ref().map(names).map_err(ToString::to_string);
    let own = Told { program: program.fingerprint(), ends, variables };
    let all = mesh.whole().all_gather_object(&own)?;
    let built = built?;
    if let Some((rank, cause)) =
        all.iter().enumerate().find_map(|(rank, told)| Some((rank, told.variables.as_ref().err()?)))
    {
        return Err(PipelineError::NotBuilt { rank, cause: cause.clone() }.into());
    }
    let is_other = |told: &Told| (told.program, &told.ends) != (all[0].program, &all[0].ends);
    if let Some(rank) = all.iter().position(is_other) {
        return Err(PipelineError::OtherProgram { rank }.into());
    }
    let own = names(&built);
    let all = all.into_iter().flat_map(|told| told.variables.unwrap_or_default());
    let elsewhere = all.filter(|name| !own.contains(name)).collect();
    Ok((built, elsewhere))
}
