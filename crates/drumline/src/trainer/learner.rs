//! The model on its engine: batches become losses, losses become gradients, gradients become a step of the optimizer.
//!
//! ```text
//!   batch ─ forward ─▶ output ─ loss ─▶ sum of losses ─ × factor ─ backward ─▶ gradients of all ranks
//! ```
//! Sums of losses are divided by the count of the whole step over all ranks before backward, so that nothing else
//! divides. Not here: which batches (`supply`), callbacks and the order of operations in a step (`step`), CUDA graphs
//! (`graphs`).

use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use drumline_comm::{ProcessGroup, on_behalf_of};
use drumline_observe::trace::Track;
use drumline_parallel::pipeline::Pipeline;
use drumline_parallel::{Agreed, Clip, Engine, GradSync, ParallelError};
use drumline_torch::{
    Autocast, LossScaler, MaskScope, Masks, Named, StepMade, StepSamples, TorchError, Unscaled, nccl,
};
use tch::{Device, Tensor, no_grad};

use super::batch::Batch;
use super::context::Context;
use super::error::TrainerError;
use super::hooks::Hook;
use super::loss::Loss;
use super::metric::Scores;
use super::model::{Mode, Model};
use super::settings::Precision;
use super::waits::Waits;
use crate::checkpoint::{CheckpointError, StateLayout, is_divided};
use crate::comm::shared_failure::guarded;
use crate::schedule::Schedule;

/// What is known of a micro-batch before its forward.
#[derive(Debug, Clone, Copy)]
struct MicroBatch {
    sync: GradSync,
    /// As in [`Learner::enter_masks`].
    seen: usize,
}

pub(super) struct Learner<'a, M: Model<B> + ?Sized, B: Batch> {
    pub(super) model: &'a M,
    /// Where the model trains.
    pub(super) device: Device,
    pub(super) engine: Rc<dyn Engine>,
    /// What runs the model, if it is cut into stages.
    pub(super) pipeline: Option<Rc<Pipeline>>,
    pub(super) loss: Box<dyn Loss<B, M::Output> + 'a>,
    /// Metrics of each step.
    pub(super) scores: Scores<'a, B, M::Output>,
    pub(super) precision: Precision,
    /// Only in fp16.
    pub(super) scaler: Option<LossScaler>,
    pub(super) clips: Vec<Clip>,
    /// Sets the learning rate of each step, if there is one.
    pub(super) schedule: Option<Box<dyn Schedule + 'a>>,
    /// The betas that the schedule has set last.
    pub(super) betas: Option<(f64, f64)>,
    /// Whether the optimizer has made a step in this run, and so has allocated its state.
    pub(super) has_stepped: bool,
    /// Where dropout draws from.
    pub(super) masks: Masks,
    pub(super) waits: Arc<Waits>,
    pub(super) site: &'static Location<'static>,
}

/// The results of forward and backward, besides gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Computed {
    /// The sum of this rank's losses.
    pub(super) sum: f64,
    /// Set if a graph ran the step, and has unscaled and clipped the gradients.
    pub(super) by_graph: Option<ByGraph>,
}

/// The results of a graph, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ByGraph {
    /// Only in fp16.
    pub(super) rescaled: Option<Rescaled>,
    /// The norm of the gradients before they were clipped by it.
    pub(super) norm: Option<f64>,
}

/// The outcome of loss scaling in a graph.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rescaled {
    pub(super) has_overflowed: bool,
    /// The scale of the next step.
    pub(super) scale: f64,
}

impl<M: Model<B> + ?Sized, B: Batch> Learner<'_, M, B> {
    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Whether ranks divide the training's state among them; the same on all ranks.
    pub(super) fn is_divided(&self) -> bool {
        is_divided(self.engine.mesh().shape())
    }

    /// Whether checkpoints are found first and then read in parts, because ranks divide the state or do not have all of it in
    /// memory; the same on all ranks.
    pub(super) fn reads_parts(&self) -> bool {
        self.is_divided() || !self.engine.state_groups().is_empty()
    }

    /// How ranks divide the training's state; `None` if each rank has all of it.
    pub(super) fn layout(&self) -> Result<Option<StateLayout>, CheckpointError> {
        StateLayout::of_engine(&*self.engine)
    }

    /// The ranks that add up losses and metrics. In a pipeline all ranks do, and only some have losses that count.
    pub(super) fn scored_by(&self) -> &ProcessGroup {
        match &self.pipeline {
            Some(_) => self.engine.mesh().whole(),
            None => self.engine.mesh().losses(),
        }
    }

    /// Whether this rank's losses and metrics count.
    pub(super) fn has_scores(&self) -> bool {
        self.model.staged().is_none_or(|staged| staged.stages().counts_losses())
    }

    /// Enters autocast until the result is dropped.
    pub(super) fn autocast(&self) -> Result<Option<Autocast>, TorchError> {
        self.precision.enter_autocast(self.device())
    }

    /// Dropout draws the masks of this batch, until the result is dropped. `seen` samples of this rank come before it in the
    /// step. Ranks take samples in turn, so that any number of ranks draws the same masks.
    pub(super) fn enter_masks(&self, seen: usize, batch: &B) -> MaskScope {
        self.masks.enter(self.step_samples(seen, batch.num_samples()))
    }

    /// Which samples of the step a batch has.
    pub(super) fn step_samples(&self, seen: usize, count: usize) -> StepSamples {
        let ranks = self.engine.mesh().samples();
        let (rank, stride) = (ranks.rank() as u64, ranks.size() as u64);
        StepSamples { first: rank + stride * seen as u64, stride, count: count as u64 }
    }

    /// Begins a step of this rank's batches, which may be none.
    pub(super) fn begin_step(&self, agreed: &Agreed) -> Result<(), ParallelError> {
        if self.pipeline.is_some() {
            // The pipeline begins it with its micro-batches.
            return Ok(());
        }
        self.waits.over(|| on_behalf_of(self.site, || self.engine.begin_step(agreed)))
    }

    /// The gradients of the mean loss over all samples of all ranks.
    pub(super) fn gradients(
        &mut self,
        context: &mut Context<'_>,
        batches: Vec<B>,
        agreed: &Agreed,
    ) -> Result<Computed, TrainerError> {
        if let Some(pipeline) = &self.pipeline {
            let pipeline = Rc::clone(pipeline);
            return self.pipelined(&pipeline, context, batches, agreed);
        }
        let factor = agreed.factor_of_sums();
        let most = agreed.most_batches();
        let (mut sum, mut done, mut seen) = (0.0, 0, 0);
        for batch in batches {
            let sync = GradSync::of(done, most);
            self.engine.begin_micro_batch();
            let samples = batch.num_samples();
            let Some(loss) = self.loss_of(context, batch, MicroBatch { sync, seen })? else { break };
            let begin = Instant::now();
            self.backward(&(&loss * factor), sync)?;
            context.tracer.span("backward", Track::Compute, begin);
            (done, seen) = (done + 1, seen + samples);
            sum += loss.f_double_value(&[]).map_err(TorchError::from)?;
        }
        if done < most {
            on_behalf_of(self.site, || self.engine.join_rest(done, most))?;
            // There is no loss whose value would wait for the GPU.
            nccl::settle(self.device())?;
        }
        Ok(Computed { sum, by_graph: None })
    }

    /// Backward from a part of the mean loss, in fp16 from a scaled one.
    pub(super) fn backward(&self, part: &Tensor, sync: GradSync) -> Result<(), ParallelError> {
        let backward = |part: &Tensor| on_behalf_of(self.site, || self.engine.backward(part, sync));
        match &self.scaler {
            None => backward(part),
            Some(scaler) => scaler.backward_with(part, backward).map(drop),
        }
    }

    /// The sum of a batch's losses, ready for backward; `None` after a failure, which is kept.
    fn loss_of(
        &mut self,
        context: &mut Context<'_>,
        batch: B,
        micro_batch: MicroBatch,
    ) -> Result<Option<Tensor>, TrainerError> {
        context.call(Hook::BatchBegin);
        let made = guarded(|| {
            let batch = batch.to_device(self.device())?;
            let _autocast = self.autocast()?;
            let _masks = self.enter_masks(micro_batch.seen, &batch);
            let begin = Instant::now();
            let forward = || self.model.forward_batch(&batch, Mode::Train);
            let output = self.engine.forward_with(micro_batch.sync, forward)??;
            context.tracer.span("forward", Track::Compute, begin);
            Ok((output, batch))
        });
        let made = made.and_then(|(output, batch)| {
            context.call(Hook::LossBegin);
            guarded(|| {
                let _autocast = self.autocast()?;
                no_grad(|| self.scores.update(&output, &batch))?;
                self.loss.sum(&output, &batch)
            })
        });
        match made {
            Ok(loss) => {
                context.call(Hook::BackwardBegin);
                Ok(Some(loss))
            }
            Err(failure) => {
                let step = context.state.step + 1;
                if self.engine.is_lockstep() {
                    // The other ranks may be waiting inside their forward.
                    return Err(TrainerError::Forward { step, cause: failure.text });
                }
                context.hooks.note(failure.within(&format!("step {step}")));
                Ok(None)
            }
        }
    }

    /// Unscales gradients in fp16. Whether they have overflowed is the same on all ranks.
    pub(super) fn unscale(
        &self,
        context: &mut Context<'_>,
        computed: &Computed,
    ) -> Result<Option<Unscaled>, TrainerError> {
        let Some(scaler) = &self.scaler else { return Ok(None) };
        if let Some(rescaled) = computed.by_graph.and_then(|graph| graph.rescaled) {
            context.state.has_overflowed = rescaled.has_overflowed;
            return Ok(None);
        }
        let unscaled = self.engine.unscale(scaler, context.state.parameters.clone())?;
        context.state.has_overflowed = unscaled.has_overflowed()?;
        Ok(Some(unscaled))
    }

    /// Clips gradients, unless a graph has done it.
    pub(super) fn clip(&self, context: &mut Context<'_>, computed: &Computed) {
        if context.state.has_overflowed {
            return; // The step will be skipped.
        }
        let norm = match computed.by_graph {
            Some(ByGraph { norm, .. }) if norm.is_none_or(f64::is_finite) => Ok(norm),
            // If the norm of a graph is not finite, this finds out whose gradient is the cause.
            _ => guarded(|| Ok(self.clip_each(&context.state.parameters)?)),
        };
        match norm {
            Ok(norm) => context.state.train_metrics.extend(norm.map(|norm| ("grad_norm".to_owned(), norm))),
            Err(failure) => context.hooks.note(failure),
        }
    }

    fn clip_each(&self, parameters: &[Named]) -> Result<Option<f64>, ParallelError> {
        let norms = self.clips.iter().map(|clip| self.engine.clip(*clip, parameters));
        Ok(norms.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next())
    }

    /// Steps the optimizer by gradients that were unscaled here, unless they have overflowed.
    pub(super) fn step_unscaled(
        &mut self,
        context: &mut Context<'_>,
        unscaled: Unscaled,
    ) -> Result<(), TrainerError> {
        let Some(scaler) = &mut self.scaler else { return Ok(()) };
        let made = self.engine.step_unless_overflowed(&unscaled, &mut *context.state.optimizer)?;
        drop(unscaled.update(scaler)?);
        self.has_stepped |= made == StepMade::Yes;
        let scale = scaler.scale()?;
        context.state.note_scale(made, scale);
        Ok(())
    }
}
