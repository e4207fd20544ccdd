//! The executor that trains: stages of libtorch layers, and what each action does to them.
//!
//! ```text
//!   F   what was received ─▶ leaf ─▶ layers ─▶ output ─▶ sent and dropped; kept: the leaf, and the output's edge in the graph
//!   B   edge, gradient that was received ─▶ autograd ─▶ gradients of weights; the leaf's gradient is sent
//!   I   the same, but weight gradients are queued;  W  computes them
//! ```
//! The last stage computes the loss in its forward: the sum over the micro-batch, times a factor that is the same for the
//! whole step. Not here: messages (`link`), the order of actions (`interpreter`).

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use drumline_comm::panic_text;
use drumline_plan::pipeline::{Compute, Message, Way, Work};
use drumline_torch::{
    Autocast, GradEdge, KeepGraph, LossScaler, Masks, QueuedGrads, StepSamples, TorchError, WeightGrads,
    backward_from_edges, checkpoint, mask_layer, take_grad,
};
use tch::{Device, Kind, Tensor};

use super::interpreter::Executor;
use super::layer::{Boundary, Layer, LayerError, LayerSpec, Mode, is_differentiable, layer_failed};
use super::link::Links;
use super::options::MicroBatch;
use super::parcel::Parcel;
use crate::engine::{Engine, GradSync};
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A layer of a stage.
pub(super) struct Built {
    name: String,
    is_checkpointed: bool,
    names_masks: bool,
    /// Shared with the checkpoints of its forwards.
    layer: Arc<Mutex<Box<dyn Layer>>>,
}

impl Built {
    pub(super) fn new(spec: &LayerSpec, layer: Box<dyn Layer>) -> Self {
        let &LayerSpec { ref name, is_checkpointed, names_masks, .. } = spec;
        Self { name: name.clone(), is_checkpointed, names_masks, layer: Arc::new(Mutex::new(layer)) }
    }
}

/// A stage of this rank.
pub(super) struct Stage {
    pub(super) device: Device,
    pub(super) layers: Vec<Built>,
    /// Where weight gradients are queued, if the program computes them apart.
    pub(super) weight_grads: Option<WeightGrads>,
}

impl Stage {
    /// The outputs of all layers.
    fn forward(&self, mut xs: Boundary, mode: Mode) -> Result<Boundary> {
        for built in &self.layers {
            let _layer = (!built.names_masks).then(|| mask_layer(&built.name, 0));
            let made = self.apply(built, &xs, mode);
            xs = made.map_err(|cause| layer_failed(&built.name, &cause))?;
        }
        Ok(xs)
    }

    fn apply(&self, built: &Built, xs: &[Tensor], mode: Mode) -> std::result::Result<Boundary, LayerError> {
        let (layer, grads) = (built.layer.clone(), self.weight_grads.clone());
        let body = move |xs: &[Tensor]| {
            let xs = xs.iter().map(Tensor::shallow_clone).collect();
            let layer = layer.lock().unwrap_or_else(PoisonError::into_inner);
            match &grads {
                Some(grads) => grads.forward(|| layer.forward(xs, mode)),
                None => layer.forward(xs, mode),
            }
        };
        if built.is_checkpointed && mode.is_train() {
            Ok(checkpoint(body, &xs.iter().collect::<Vec<_>>())?)
        } else {
            body(xs)
        }
    }
}

/// What a forward leaves for its backward.
struct Saved {
    /// The inputs whose gradients the stage before needs, as leaves.
    leaves: Vec<Option<Tensor>>,
    edges: Vec<Option<GradEdge>>,
    samples: StepSamples,
    /// The loss times its factor, in the last stage.
    loss: Option<Tensor>,
}

/// The loss of the micro-batch at an index, as a sum.
pub type LossOf<'a> = dyn FnMut(&[Tensor], usize) -> std::result::Result<Tensor, LayerError> + 'a;

/// A step, or an evaluation, of the stages of a rank.
pub(super) struct TorchExecutor<'a> {
    pub(super) stages: &'a HashMap<usize, Stage>,
    pub(super) last_stage: usize,
    pub(super) engine: &'a dyn Engine,
    pub(super) links: &'a mut Links,
    pub(super) micro_batches: &'a [MicroBatch],
    pub(super) loss: &'a mut LossOf<'a>,
    pub(super) factor: f64,
    pub(super) scaler: Option<&'a LossScaler>,
    pub(super) masks: Option<&'a Masks>,
    /// The type of autocast in forwards.
    pub(super) autocast: Option<Kind>,
    pub(super) mode: Mode,
    pub(super) held: Held,
}

/// What a rank holds during a step, and the most that it has held.
#[derive(Default)]
pub(super) struct Held {
    saved: HashMap<(usize, usize), Saved>,
    queued: HashMap<(usize, usize), QueuedGrads>,
    /// The sum of losses of each micro-batch.
    pub(super) losses: HashMap<usize, Tensor>,
    pub(super) peak_activations: usize,
    received: usize,
    pub(super) peak_received: usize,
    /// When each computation began and ended.
    pub(super) spans: Vec<(Work, Instant, Instant)>,
    /// The same of waiting for each message.
    pub(super) waits: Vec<(Message, Instant, Instant)>,
}

impl Held {
    fn note(&mut self) {
        self.peak_activations = self.peak_activations.max(self.saved.len() + self.queued.len());
        self.peak_received = self.peak_received.max(self.received);
    }
}

impl TorchExecutor<'_> {
    fn stage(&self, stage: usize) -> Result<&Stage> {
        self.stages.get(&stage).ok_or(ParallelError::Internal { what: "a stage of another rank" })
    }

    fn forward(&mut self, stage: usize, micro_batch: usize, got: Option<Parcel>) -> Result<Option<Parcel>> {
        let here = self.stage(stage)?;
        let (inputs, leaves, samples) = self.inputs(here, micro_batch, got)?;
        let engine = self.engine;
        let mut outputs = None;
        let mut run = || {
            let _masks = self.masks.map(|masks| masks.enter(samples));
            let _autocast = match self.autocast.map(|kind| Autocast::new(here.device, kind)).transpose() {
                Ok(scope) => scope,
                Err(error) => return outputs = Some(Err(error.into())),
            };
            let inputs = inputs.iter().map(Tensor::shallow_clone).collect();
            outputs = Some(here.forward(inputs, self.mode));
        };
        match self.mode {
            Mode::Train => engine.forward(GradSync::Accumulate, &mut run)?,
            // Not by the engine, which would wait for the other ranks of the model in each forward: those of later stages
            // wait for this one.
            Mode::Evaluate => tch::no_grad(&mut run),
        }
        drop(inputs);
        let outputs = outputs.ok_or(ParallelError::Internal { what: "a forward did not run" })??;
        let saved = Saved { leaves, edges: Vec::new(), samples, loss: None };
        if stage == self.last_stage {
            return self.end([stage, micro_batch], &outputs, saved).map(|()| None);
        }
        let edges = outputs.iter().map(GradEdge::of).collect::<std::result::Result<Vec<_>, _>>()?;
        let needs_grad = edges.iter().map(Option::is_some).collect();
        let tensors = outputs.iter().map(|output| Ok(Some(output.f_detach()?))).collect::<Result<_>>()?;
        self.save([stage, micro_batch], Saved { edges, ..saved });
        Ok(Some(Parcel { samples, tensors, needs_grad }))
    }

    /// The inputs of a stage: leaves, where the stage before needs gradients.
    fn inputs(
        &self,
        stage: &Stage,
        micro_batch: usize,
        got: Option<Parcel>,
    ) -> Result<(Boundary, Vec<Option<Tensor>>, StepSamples)> {
        let Some(Parcel { samples, tensors, needs_grad }) = got else {
            let MicroBatch { inputs, samples, .. } = &self.micro_batches[micro_batch];
            let inputs = inputs.iter().map(|input| Ok(input.f_to_device(stage.device)?));
            return Ok((inputs.collect::<Result<_>>()?, Vec::new(), *samples));
        };
        let (mut inputs, mut leaves) = (Vec::new(), Vec::new());
        for (tensor, needs_grad) in tensors.into_iter().zip(needs_grad) {
            let tensor = tensor.ok_or(ParallelError::Internal { what: "an activation did not travel" })?;
            let mut input = tensor.f_to_device(stage.device)?.f_detach()?;
            let is_leaf = needs_grad && self.mode.is_train() && is_differentiable(input.kind());
            if is_leaf {
                input = input.f_set_requires_grad(true)?;
            }
            leaves.push(is_leaf.then(|| input.shallow_clone()));
            inputs.push(input);
        }
        Ok((inputs, leaves, samples))
    }

    /// The loss of a micro-batch.
    fn end(&mut self, at: [usize; 2], outputs: &[Tensor], saved: Saved) -> Result {
        let [_, micro_batch] = at;
        let of_loss = |cause: LayerError| layer_failed("loss", &cause);
        if !self.mode.is_train() {
            let sum = tch::no_grad(|| (self.loss)(outputs, micro_batch)).map_err(of_loss)?;
            self.held.losses.insert(micro_batch, sum.f_detach()?);
            return Ok(());
        }
        let sum = (self.loss)(outputs, micro_batch).map_err(of_loss)?;
        if sum.numel() != 1 {
            let got = format!("a tensor of size {:?}", sum.size());
            return Err(ParallelError::value(
                "the loss of a micro-batch",
                got,
                "a number, the sum over the micro-batch",
            ));
        }
        self.held.losses.insert(micro_batch, sum.f_detach()?);
        let mut scaled = sum.f_mul_scalar(self.factor)?;
        if let Some(scaler) = self.scaler {
            let mut held = None;
            let _ = scaler.backward_with(&scaled, |scaled| {
                held = Some(scaled.shallow_clone());
                Ok::<_, TorchError>(())
            })?;
            scaled = held.ok_or(ParallelError::Internal { what: "a loss was not scaled" })?;
        }
        let edges = vec![GradEdge::of(&scaled)?];
        self.save(at, Saved { edges, loss: Some(scaled), ..saved });
        Ok(())
    }

    fn save(&mut self, [stage, micro_batch]: [usize; 2], saved: Saved) {
        if self.mode.is_train() {
            self.held.saved.insert((stage, micro_batch), saved);
        }
    }

    /// Backward, with weight gradients or without.
    fn backward(&mut self, work: Work, got: Option<Parcel>) -> Result<Option<Parcel>> {
        let Work { compute, stage, micro_batch } = work;
        let missing = ParallelError::Internal { what: "a backward without its forward" };
        let Saved { leaves, edges, samples, loss } =
            self.held.saved.remove(&(stage, micro_batch)).ok_or(missing)?;
        let here = self.stage(stage)?;
        let grads = match (got, loss) {
            (Some(parcel), _) => parcel.tensors,
            (None, Some(loss)) => vec![Some(loss.f_ones_like()?.f_detach()?)],
            (None, None) => Vec::new(),
        };
        let grads = grads.into_iter().map(|grad| grad.map(|grad| grad.f_to_device(here.device)).transpose());
        let grads = grads.collect::<std::result::Result<Vec<_>, _>>()?;
        let pairs = edges.iter().zip(&grads).filter_map(|(edge, grad)| edge.as_ref().zip(grad.as_ref()));
        let (edges_of, grads_of): (Vec<&GradEdge>, Vec<&Tensor>) = pairs.unzip();
        let mut queued = None;
        self.engine.accumulate(&mut || {
            let run = || backward_from_edges(&edges_of, &grads_of, KeepGraph::No);
            match here.weight_grads.as_ref().filter(|_| compute == Compute::Input) {
                Some(grads) => queued = Some(grads.apart(run)?),
                None => run()?,
            }
            Ok(())
        })?;
        drop(edges);
        if compute == Compute::Input {
            let queued = queued
                .ok_or(ParallelError::Internal { what: "a stage has no queue for weight gradients" })?;
            self.held.queued.insert((stage, micro_batch), queued);
        }
        let needs_grad = vec![false; leaves.len()];
        let of_leaf = |leaf: Option<Tensor>| leaf.map_or(Ok(None), |leaf| take_grad(&leaf));
        let tensors = leaves.into_iter().map(of_leaf).collect::<std::result::Result<_, _>>()?;
        Ok(Some(Parcel { samples, tensors, needs_grad }))
    }

    fn weight(&mut self, stage: usize, micro_batch: usize) -> Result {
        let missing = ParallelError::Internal { what: "weight gradients without an input gradient" };
        let queued = self.held.queued.remove(&(stage, micro_batch)).ok_or(missing)?;
        Ok(queued.compute()?)
    }

    fn carry_out(&mut self, work: Work, got: Option<Parcel>) -> Result<Option<Parcel>> {
        match work.compute {
            Compute::Forward => self.forward(work.stage, work.micro_batch, got),
            Compute::Backward | Compute::Input => self.backward(work, got),
            Compute::Weight => self.weight(work.stage, work.micro_batch).map(|()| None),
        }
    }
}

impl Executor for TorchExecutor<'_> {
    type Value = Parcel;
    type Error = ParallelError;

    fn compute(&mut self, work: Work, got: Option<Parcel>) -> Result<Option<Parcel>> {
        self.links.check()?;
        let began = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.carry_out(work, got)));
        self.held.spans.push((work, began, Instant::now()));
        self.held.note();
        outcome.unwrap_or_else(|panic| {
            Err(layer_failed("a layer", &format!("panicked: {}", panic_text(&*panic))))
        })
    }

    fn send(&mut self, message: Message, to: usize, value: Parcel) -> Result {
        self.links.send(message, to, value)
    }

    fn expect(&mut self, message: Message, from: usize) -> Result {
        // The stage that gets a message is the next one, or the one before.
        let to = match message.way {
            Way::Forward => message.stage + 1,
            Way::Backward => message.stage.saturating_sub(1),
        };
        let device = self.stage(to)?.device;
        self.held.received += 1;
        self.held.note();
        self.links.expect(message, from, device)
    }

    fn receive(&mut self, message: Message, from: usize) -> Result<Parcel> {
        let began = Instant::now();
        let parcel = self.links.receive(message, from)?;
        self.held.waits.push((message, began, Instant::now()));
        self.held.received -= 1;
        Ok(parcel)
    }

    fn reduce(&mut self, _: usize) -> Result {
        // The engine reduces all stages of a rank together, when ties are added up: see `engine`.
        Ok(())
    }

    fn broken(&self, what: &'static str) -> ParallelError {
        ParallelError::Internal { what }
    }
}

/// The sum of the losses of all micro-batches, in their order.
pub(super) fn sum_of(losses: &HashMap<usize, Tensor>) -> Result<f64> {
    let mut places: Vec<_> = losses.keys().copied().collect();
    places.sort_unstable();
    places.into_iter().try_fold(0.0, |sum, place| {
        Ok(sum + losses[&place].f_to_kind(Kind::Double)?.f_sum(Kind::Double)?.f_double_value(&[])?)
    })
}
