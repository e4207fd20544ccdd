//! `Pipeline`: steps and evaluations of a model of which each rank along `pp` has some stages.
//!
//! ```text
//!   Agreed ─▶ step: forwards and backwards of all micro-batches ─▶ ties added up ─▶ reduced over replicas ─▶ the loss, on all ranks
//!             then engine(): unscale ─▶ clip, by the norm of all stages ─▶ step of the optimizer
//! ```
//! The engine within belongs to the ranks that have the same stages. A rank that fails ends all links, so that every rank
//! returns an error within a second: its own action, and the one that failed.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use drumline_comm::{Axis, Mesh, ReduceOp};
use drumline_plan::pipeline::{Program, StageMap, Work};
use drumline_torch::{LossScaler, Masks};
use tch::Tensor;
use tch::nn::VarStore;

use super::cut::{Cut, plans};
use super::error::PipelineError;
use super::interpreter::{Halted, run_row};
use super::layer::{LayerError, LayerList, Mode};
use super::link::Links;
use super::options::{MicroBatch, PipelineOptions, Scale, StepLoss};
use super::plan::{Order, Plan};
use super::ties::Ties;
use super::torch::{Held, LossFn, Stage, TorchExecutor, sum_of};
use crate::agreement::Agreed;
use crate::engine::{Alone, Engine, EngineOptions, EngineSetup, Forwards, ModelParts, Part};
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A model of which each rank along `pp` has some stages.
pub struct Pipeline {
    store: VarStore,
    engine: Box<dyn Engine>,
    stages: HashMap<usize, Stage>,
    layers: Vec<Range<usize>>,
    map: StageMap,
    order: Order,
    ranks: usize,
    /// By the number of micro-batches, for training and for evaluation.
    plans: RefCell<HashMap<usize, [Arc<Plan>; 2]>>,
    links: RefCell<Links>,
    ties: Ties,
    masks: Option<Masks>,
    ended: RefCell<Option<String>>,
    peaks: Cell<[usize; 2]>,
    spans: RefCell<Vec<(Work, Instant, Instant)>>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline")
            .field("map", &self.map)
            .field("layers", &self.layers)
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Cuts a model, and builds the layers of this rank. All ranks of the mesh call it with the same layers and options.
    #[track_caller]
    pub fn new(layers: &LayerList, mesh: &Mesh, options: PipelineOptions) -> Result<Self> {
        let pp = mesh.axis(Axis::Pp);
        let cut = Cut::new(layers, pp, &options)?;
        let built = cut.build(layers, &options);
        let program = cut.plans[0].program();
        let (store, stages) = check_built(mesh, program, &cut.layers, built)?;
        let ties = Ties::new(pp, &store, &layers.ties, |tie| cut.holders(layers, tie))?;
        let links = Links::new(pp, program)?;
        let PipelineOptions { order, micro_batches, masks, parts, within, .. } = options;
        let engine = engine(&store, &stages, EngineParts { mesh, parts: parts(), within })?;
        let Cut { map, layers, ranks, plans, .. } = cut;
        Ok(Self {
            store,
            engine,
            stages,
            layers,
            map,
            order,
            ranks,
            plans: HashMap::from([(micro_batches, plans)]).into(),
            links: links.into(),
            ties,
            masks,
            ended: None.into(),
            peaks: [0; 2].into(),
            spans: Vec::new().into(),
        })
    }

    /// The engine of this rank's stages: norms, clipping, unscaling, the optimizer's step and the state to save.
    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// The variables of this rank's stages, with the names of the whole model.
    pub fn store(&self) -> &VarStore {
        &self.store
    }

    /// The layers of each stage.
    pub fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Which rank holds which stage.
    pub fn stages(&self) -> &StageMap {
        &self.map
    }

    /// Whether this rank computes the loss.
    pub fn has_last_stage(&self) -> bool {
        self.stages.contains_key(&(self.layers.len() - 1))
    }

    /// The most activations that this rank has held in a step, one for a stage and a micro-batch: what
    /// [`Plan::activations`] predicts.
    pub fn peak_activations(&self) -> usize {
        self.peaks.get()[0]
    }

    /// The most tensors that were on their way to this rank or had not been used: what [`Plan::receive_buffers`] predicts.
    pub fn peak_received(&self) -> usize {
        self.peaks.get()[1]
    }

    /// The computations of this rank in the last step, with the times at which they began and ended; on a GPU, at which they
    /// were launched.
    pub fn spans(&self) -> Vec<(Work, Instant, Instant)> {
        self.spans.borrow().clone()
    }

    /// The plan of a step with this many micro-batches.
    pub fn plan(&self, micro_batches: usize) -> Result<Arc<Plan>> {
        self.plan_for(micro_batches, Mode::Train)
    }

    fn plan_for(&self, micro_batches: usize, mode: Mode) -> Result<Arc<Plan>> {
        let place = usize::from(!mode.is_train());
        if let Some(found) = self.plans.borrow().get(&micro_batches) {
            return Ok(found[place].clone());
        }
        let pp = self.engine.mesh().axis(Axis::Pp).size();
        let made = plans(&self.order, self.ranks, micro_batches, pp)?;
        let plan = made[place].clone();
        self.plans.borrow_mut().insert(micro_batches, made);
        Ok(plan)
    }

    /// The forwards and backwards of a step, on all ranks. `loss` runs on the rank with the last stage: it returns the sum
    /// of the losses of a micro-batch, of its outputs and the micro-batch.
    ///
    /// Gradients are those of the sum of all ranks' losses divided by the count that was agreed. The step of the optimizer
    /// follows, by [`engine`](Self::engine).
    #[track_caller]
    pub fn step(
        &self,
        agreed: &Agreed,
        micro_batches: &[MicroBatch],
        scale: Scale<'_>,
        mut loss: impl FnMut(&[Tensor], &MicroBatch) -> std::result::Result<Tensor, LayerError>,
    ) -> Result<StepLoss> {
        let begun = self.check_agreed(agreed, micro_batches.len());
        begun
            .and_then(|()| self.engine.begin_step(agreed))
            .inspect_err(|cause| self.end(&cause.to_string()))?;
        let scaler = match scale {
            Scale::No => None,
            Scale::By(scaler) => Some(scaler),
        };
        let run = Run { mode: Mode::Train, micro_batches, factor: agreed.factor_of_sums(), scaler };
        let mut held = self.carry_out(&run, &mut loss)?;
        self.peaks.set([held.peak_activations, held.peak_received]);
        self.spans.replace(std::mem::take(&mut held.spans));
        let reduced = self.ties.sum().and_then(|()| self.engine.reduce_accumulated());
        let sum =
            reduced.and_then(|()| self.shared_sum(&held)).map_err(|cause| self.stopped_at_end(cause))?;
        Ok(StepLoss { sum, count: agreed.count })
    }

    /// The forwards of an evaluation, on all ranks along `pp`. `loss` runs on the rank with the last stage, for each
    /// micro-batch in some order. Returns the sum of what it returns over all ranks.
    #[track_caller]
    pub fn evaluate(
        &self,
        micro_batches: &[MicroBatch],
        mut loss: impl FnMut(&[Tensor], &MicroBatch) -> std::result::Result<Tensor, LayerError>,
    ) -> Result<f64> {
        self.check_same_number(micro_batches.len())?;
        self.engine.begin_evaluation(Forwards::Any)?;
        let run = Run { mode: Mode::Evaluate, micro_batches, factor: 1.0, scaler: None };
        let outcome = self
            .carry_out(&run, &mut loss)
            .and_then(|held| self.shared_sum(&held).map_err(|cause| self.stopped_at_end(cause)));
        let failure = outcome.as_ref().err().map(ToString::to_string);
        self.engine.end_evaluation(failure.as_deref())?;
        outcome
    }

    /// Ends this rank and all others, which learn the cause.
    pub fn abort(&self, cause: &str) {
        self.end(cause);
    }

    /// An error unless all ranks of this pipeline bring the same number of micro-batches.
    fn check_agreed(&self, agreed: &Agreed, own: usize) -> Result {
        let mesh = self.engine.mesh();
        let whole = mesh.shape().peers(mesh.whole().rank(), &[Axis::Pp]);
        let first = whole[0];
        let expected = agreed.batches[first];
        let other = whole.iter().copied().find(|&rank| agreed.batches[rank] != expected);
        match other {
            Some(rank) => {
                Err(PipelineError::Uneven { rank, got: agreed.batches[rank], first, expected }.into())
            }
            None if !(agreed.count.is_finite() && agreed.count > 0.0) => Err(ParallelError::value(
                "the count of a step",
                agreed.count,
                "more than 0; try to count on the ranks with the first stage, which are asked for it",
            )),
            None if own != expected => Err(ParallelError::value(
                "the number of micro-batches of a step",
                own,
                format!("{expected}, as agreed"),
            )),
            None => Ok(()),
        }
    }

    /// The same for an evaluation, in which ranks have agreed on nothing.
    fn check_same_number(&self, own: usize) -> Result {
        let mesh = self.engine.mesh();
        let pp = mesh.axis(Axis::Pp);
        let mut all = vec![0u64; pp.size()];
        pp.all_gather(&[own as u64], &mut all)?;
        let ranks = mesh.shape().peers(mesh.whole().rank(), &[Axis::Pp]);
        match all.iter().position(|other| *other != all[0]) {
            Some(place) => {
                let [got, expected] = [all[place], all[0]].map(|number| number as usize);
                Err(PipelineError::Uneven { rank: ranks[place], got, first: ranks[0], expected }.into())
            }
            None => Ok(()),
        }
    }

    fn carry_out(&self, run: &Run<'_>, loss: &mut LossFn<'_>) -> Result<Held> {
        if let Some(cause) = &*self.ended.borrow() {
            return Err(PipelineError::Ended { cause: cause.clone() }.into());
        }
        if run.micro_batches.is_empty() {
            return Ok(Held::default());
        }
        let plan = self.plan_for(run.micro_batches.len(), run.mode)?;
        let mut links = self.links.borrow_mut();
        links.begin_step();
        let mesh = self.engine.mesh();
        let mut executor = TorchExecutor {
            stages: &self.stages,
            last_stage: self.layers.len() - 1,
            engine: &*self.engine,
            links: &mut links,
            micro_batches: run.micro_batches,
            loss,
            factor: run.factor,
            scaler: run.scaler,
            masks: self.masks.as_ref().filter(|_| run.mode.is_train()),
            mode: run.mode,
            held: Held::default(),
        };
        let outcome = run_row(&plan, mesh.axis(Axis::Pp).rank(), &mut executor);
        let held = executor.held;
        let rank = mesh.whole().rank();
        let failed = |Halted { action, cause }: Halted<ParallelError>| {
            if cause.comm_error().is_some() {
                (cause.to_string(), PipelineError::Stopped { rank, action, cause: Box::new(cause) })
            } else {
                let error = PipelineError::Failed { rank, action, cause: Box::new(cause) };
                (error.to_string(), error)
            }
        };
        if let Err((cause, error)) = outcome.map_err(failed) {
            links.abort(&cause);
            drop(links);
            self.end(&cause);
            return Err(error.into());
        }
        Ok(held)
    }

    /// The error of what all ranks do together after their rows.
    fn stopped_at_end(&self, cause: ParallelError) -> ParallelError {
        self.end(&cause.to_string());
        PipelineError::StoppedAtEnd { rank: self.engine.mesh().whole().rank(), cause: Box::new(cause) }.into()
    }

    /// Ends everything that other ranks may wait for.
    fn end(&self, cause: &str) {
        if let Ok(links) = self.links.try_borrow() {
            links.abort(cause);
        }
        self.ties.abort(cause);
        self.engine.abort(cause);
        // In which all ranks add up losses, those of other replicas as well.
        self.engine.mesh().whole().abort(cause);
        *self.ended.borrow_mut() = Some(cause.to_owned());
    }

    /// The sum of losses over all ranks, each micro-batch once.
    fn shared_sum(&self, held: &Held) -> Result<f64> {
        let mesh = self.engine.mesh();
        let counts = self.has_last_stage() && mesh.coordinate(Axis::Tp) == 0;
        let mut sum = [if counts { sum_of(&held.losses)? } else { 0.0 }];
        mesh.whole().all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum[0])
    }
}

/// What a step and an evaluation do differently.
struct Run<'a> {
    mode: Mode,
    micro_batches: &'a [MicroBatch],
    factor: f64,
    scaler: Option<&'a LossScaler>,
}

/// What the engine of a rank's stages is made of.
struct EngineParts<'a> {
    mesh: &'a Mesh,
    parts: Vec<Part>,
    within: Box<dyn EngineOptions>,
}

/// The engine of a rank's stages.
#[track_caller]
fn engine(store: &VarStore, stages: &HashMap<usize, Stage>, of: EngineParts<'_>) -> Result<Box<dyn Engine>> {
    let EngineParts { mesh, parts, within } = of;
    let parts = ModelParts::meet(store, mesh, &parts)?;
    let device = store.device();
    if stages.values().all(|stage| stage.device == device) {
        return within.engine(EngineSetup { parts, ..EngineSetup::new(store, mesh) });
    }
    if mesh.whole().size() > 1 {
        let got = format!("{} processes", mesh.whole().size());
        return Err(ParallelError::value(
            "a pipeline of several devices in each process",
            got,
            "one process",
        ));
    }
    Ok(Box::new(Alone::new(store, mesh)))
}

/// What was built; an error unless all ranks have built their stages, with the same program and the same cut.
#[track_caller]
fn check_built<B>(mesh: &Mesh, program: &Program, cut: &[Range<usize>], built: Result<B>) -> Result<B> {
    let ends: Vec<_> = cut.iter().map(|range| range.end as u64).collect();
    let own = (program.fingerprint(), ends, built.as_ref().err().map(ToString::to_string));
    let all = mesh.whole().all_gather_object(&own)?;
    let built = built?;
    if let Some((rank, cause)) =
        all.iter().enumerate().find_map(|(rank, (.., cause))| Some((rank, cause.as_ref()?)))
    {
        return Err(PipelineError::NotBuilt { rank, cause: cause.clone() }.into());
    }
    match all.iter().position(|(program, ends, _)| (program, ends) != (&all[0].0, &all[0].1)) {
        Some(rank) => Err(PipelineError::OtherProgram { rank }.into()),
        None => Ok(built),
    }
}
