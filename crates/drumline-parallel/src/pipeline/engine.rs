//! `Pipeline`: steps and evaluations of a model of which each rank along `pp` has some stages.
//!
//! ```text
//!   Agreed ─▶ step: forwards and backwards of all micro-batches ─▶ ties added up ─▶ reduced over replicas ─▶ the loss, on all ranks
//!             then engine(): unscale ─▶ clip, by the norm of all stages ─▶ step of the optimizer
//! ```
//! The engine within belongs to the ranks that have the same stages. A rank that fails ends all links, so that every rank
//! returns an error within a second: its own action, and the one that failed.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drumline_comm::{Axis, Mesh, ReduceOp};
use drumline_plan::pipeline::{Message, StageMap, Work};
use drumline_torch::{LossScaler, Masks};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::error::PipelineError;
use super::interpreter::{Halted, run_row};
use super::layer::{LayerError, LayerList, Mode};
use super::link::Links;
use super::options::{MicroBatch, PipelineOptions, Scale, StepLoss};
use super::plan::Plan;
use super::stages::Stages;
use super::torch::{Held, LossOf, TorchExecutor, sum_of};
use crate::agreement::Agreed;
use crate::engine::{Alone, Engine, EngineOptions, EngineSetup, Forwards, ModelParts, Part};
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A model of which each rank along `pp` has some stages.
pub struct Pipeline {
    stages: Rc<Stages>,
    engine: Rc<dyn Engine>,
    links: RefCell<Links>,
    masks: Option<Masks>,
    autocast: Option<Kind>,
    ended: RefCell<Option<String>>,
    peaks: Cell<[usize; 2]>,
    spans: RefCell<Vec<(Work, Instant, Instant)>>,
    waits: RefCell<Vec<(Message, Instant, Instant)>>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline").field("stages", &self.stages).finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Cuts a model, and builds the layers of this rank. All ranks of the mesh call it with the same layers and options.
    #[track_caller]
    pub fn new(layers: &LayerList, mesh: &Mesh, options: PipelineOptions) -> Result<Self> {
        let stages = Stages::build_in(None, layers, mesh, &options)?;
        let PipelineOptions { masks, autocast, parts, within, .. } = options;
        let engine = engine(&stages, &parts(), within)?;
        Ok(Self { masks, autocast, ..Self::on(Rc::new(stages), engine.into())? })
    }

    /// Runs stages that are built, whose parameters have this engine. All ranks call it.
    #[track_caller]
    pub fn on(stages: Rc<Stages>, engine: Rc<dyn Engine>) -> Result<Self> {
        check_devices(&stages)?;
        let plan = stages.plan(stages.micro_batches())?;
        let links = Links::new(stages.mesh().axis(Axis::Pp), plan.program())?;
        Ok(Self {
            stages,
            engine,
            links: links.into(),
            masks: None,
            autocast: None,
            ended: None.into(),
            peaks: [0; 2].into(),
            spans: RefCell::default(),
            waits: RefCell::default(),
        })
    }

    /// Draws dropout from these masks.
    #[must_use]
    pub fn with_masks(self, masks: Masks) -> Self {
        Self { masks: Some(masks), ..self }
    }

    /// Runs forwards in autocast of this type, if there is one.
    #[must_use]
    pub fn with_autocast(self, autocast: Option<Kind>) -> Self {
        Self { autocast, ..self }
    }

    /// The engine of this rank's stages: norms, clipping, unscaling, the optimizer's step and the state to save.
    pub fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// The variables of this rank's stages, with the names of the whole model.
    pub fn store(&self) -> &VarStore {
        self.stages.store()
    }

    /// The layers of each stage.
    pub fn layers(&self) -> &[Range<usize>] {
        self.stages.layers()
    }

    /// Which rank holds which stage.
    pub fn stages(&self) -> &StageMap {
        self.stages.map()
    }

    /// Whether this rank computes the loss.
    pub fn has_last_stage(&self) -> bool {
        self.stages.has_last_stage()
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

    /// The messages that this rank has waited for in the last step, with the times at which the waiting began and ended.
    pub fn waits(&self) -> Vec<(Message, Instant, Instant)> {
        self.waits.borrow().clone()
    }

    /// The time of this rank's computations in the last step.
    pub fn busy(&self) -> Duration {
        self.spans.borrow().iter().map(|(_, begin, end)| end.saturating_duration_since(*begin)).sum()
    }

    /// The plan of a step with this many micro-batches.
    pub fn plan(&self, micro_batches: usize) -> Result<Arc<Plan>> {
        self.stages.plan(micro_batches)
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
        let of_index = &mut |outputs: &[Tensor], index: usize| loss(outputs, &micro_batches[index]);
        let own = self
            .begin(agreed, micro_batches)
            .and_then(|()| self.gradients(agreed, micro_batches, scale, of_index))?;
        let sum = self.shared_sum(own).map_err(|cause| self.stopped_at_end(cause))?;
        Ok(StepLoss { sum, count: agreed.count })
    }

    /// Begins a step on all ranks, for [`gradients`](Self::gradients).
    #[track_caller]
    pub fn begin(&self, agreed: &Agreed, micro_batches: &[MicroBatch]) -> Result {
        let begun = self.check_agreed(agreed, micro_batches.len());
        begun.and_then(|()| self.engine.begin_step(agreed)).inspect_err(|cause| self.end(&cause.to_string()))
    }

    /// [`step`](Self::step) between [`begin`](Self::begin) and the sum over ranks, for a loop that adds up losses by itself.
    /// `loss` gets the index of a micro-batch. Returns the sum of the losses that count on this rank.
    #[track_caller]
    pub fn gradients(
        &self,
        agreed: &Agreed,
        micro_batches: &[MicroBatch],
        scale: Scale<'_>,
        loss: &mut LossOf<'_>,
    ) -> Result<f64> {
        let scaler = match scale {
            Scale::No => None,
            Scale::By(scaler) => Some(scaler),
        };
        let run = Run { mode: Mode::Train, micro_batches, factor: agreed.factor_of_sums(), scaler };
        let mut held = self.carry_out(&run, loss).inspect_err(|cause| self.end(&cause.to_string()))?;
        self.peaks.set([held.peak_activations, held.peak_received]);
        self.spans.replace(std::mem::take(&mut held.spans));
        self.waits.replace(std::mem::take(&mut held.waits));
        let reduced = self.stages.ties.sum().and_then(|()| self.engine.reduce_accumulated());
        reduced.and_then(|()| self.counted_sum(&held)).map_err(|cause| self.stopped_at_end(cause))
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
        let of_index = &mut |outputs: &[Tensor], index: usize| loss(outputs, &micro_batches[index]);
        let outcome = self.evaluated(micro_batches, of_index);
        let outcome =
            outcome.and_then(|own| self.shared_sum(own).map_err(|cause| self.stopped_at_end(cause)));
        let outcome = outcome.inspect_err(|cause| self.end(&cause.to_string()));
        let failure = outcome.as_ref().err().map(ToString::to_string);
        self.engine.end_evaluation(failure.as_deref())?;
        outcome
    }

    /// Some forwards of an evaluation that the engine has begun. All ranks along `pp` make the same number of them; `loss`
    /// gets the index of a micro-batch. Returns the sum of what counts on this rank. A failure ends the messages of this
    /// pipeline, and no other group: ranks can agree on it.
    #[track_caller]
    pub fn forwards(&self, micro_batches: &[MicroBatch], loss: &mut LossOf<'_>) -> Result<f64> {
        if self.engine.parts().ends_evaluation(self.engine.mesh())? {
            return Err(ParallelError::EvaluationCut);
        }
        self.check_same_number(micro_batches.len())?;
        self.evaluated(micro_batches, loss)
    }

    fn evaluated(&self, micro_batches: &[MicroBatch], loss: &mut LossOf<'_>) -> Result<f64> {
        let run = Run { mode: Mode::Evaluate, micro_batches, factor: 1.0, scaler: None };
        let held = self.carry_out(&run, loss)?;
        self.counted_sum(&held)
    }

    /// Ends messages: ranks that wait for this one return an error.
    pub fn end_messages(&self, cause: &str) {
        if let Ok(links) = self.links.try_borrow() {
            links.abort(cause);
        }
        self.ended.borrow_mut().get_or_insert_with(|| cause.to_owned());
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
        let expected = agreed.real_batches(first);
        let other = whole.iter().copied().find(|&rank| agreed.real_batches(rank) != expected);
        match other {
            Some(rank) => {
                Err(PipelineError::Uneven { rank, got: agreed.real_batches(rank), first, expected }.into())
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

    fn carry_out(&self, run: &Run<'_>, loss: &mut LossOf<'_>) -> Result<Held> {
        if let Some(cause) = &*self.ended.borrow() {
            return Err(PipelineError::Ended { cause: cause.clone() }.into());
        }
        if run.micro_batches.is_empty() {
            return Ok(Held::default());
        }
        let plan = self.stages.plan_for(run.micro_batches.len(), run.mode)?;
        let mut links = self.links.borrow_mut();
        links.begin_step();
        let mesh = self.engine.mesh();
        let mut executor = TorchExecutor {
            stages: &self.stages.own,
            last_stage: self.stages.layers().len() - 1,
            engine: &*self.engine,
            links: &mut links,
            micro_batches: run.micro_batches,
            loss,
            factor: run.factor,
            scaler: run.scaler,
            masks: self.masks.as_ref().filter(|_| run.mode.is_train()),
            autocast: self.autocast,
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
            drop(links);
            self.end_messages(&cause);
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
        self.end_messages(cause);
        self.stages.ties.abort(cause);
        self.engine.abort(cause);
        // In which all ranks add up losses, those of other replicas as well.
        self.engine.mesh().whole().abort(cause);
    }

    /// The sum of the losses of this rank that count.
    fn counted_sum(&self, held: &Held) -> Result<f64> {
        if self.stages.counts_losses() { sum_of(&held.losses) } else { Ok(0.0) }
    }

    /// The sum over all ranks, each micro-batch once.
    fn shared_sum(&self, own: f64) -> Result<f64> {
        let mut sum = [own];
        self.engine.mesh().whole().all_reduce(&mut sum, ReduceOp::Sum)?;
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

/// An error if an engine has moved the variables of stages elsewhere: their inputs would be on another device.
fn check_devices(stages: &Stages) -> Result {
    let devices: Vec<Device> = stages.own.values().map(|stage| stage.device).collect();
    let variables = stages.store().variables();
    let Some(moved) = variables.values().map(Tensor::device).find(|device| !devices.contains(device)) else {
        return Ok(());
    };
    let expected = format!("{moved:?}, where the model trains; try VarStore::new with that device");
    Err(ParallelError::value(
        "the device of the store in which stages were built",
        format!("{devices:?}"),
        expected,
    ))
}

/// The engine of a rank's stages, of which these variables are parts.
#[track_caller]
fn engine(stages: &Stages, parts: &[Part], within: Box<dyn EngineOptions>) -> Result<Box<dyn Engine>> {
    let (store, mesh) = (stages.store(), stages.mesh());
    let parts = ModelParts::meet(store, mesh, parts)?;
    let device = store.device();
    if stages.own.values().all(|stage| stage.device == device) {
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
