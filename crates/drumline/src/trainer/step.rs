//! One step: the batches of a window, one reduction, the optimizer.
//!
//! ```text
//!   zero_grad ─▶ begin_step ─▶ gradients, eager or graph ─▶ sums of all ranks ─▶ unscale ─▶ clip ─▶ learning rate
//!            ─▶ on_backward_end ─▶ optimizer ─▶ on_step_end
//! ```
//! A rank that has failed, or has no batch, takes part without a contribution. All ranks agree on whether the step is
//! made before weights are changed.

use std::time::Instant;

use drumline_observe::trace::Track;
use drumline_parallel::Agreed;
use drumline_torch::{StepMade, Unscaled, nccl};

use super::batch::Batch;
use super::context::Context;
use super::error::TrainerError;
use super::graphs::{GraphStep, Graphs};
use super::hooks::Hook;
use super::learner::{Computed, Learner};
use super::model::Model;
use super::pipeline_trace;
use super::step_mode::StepMode;
use super::supply::{Supply, Window};
use crate::comm::shared_failure::SharedFailure;

/// The parts of the training that a step uses.
pub(super) struct Step<'r, 'a, M: Model<B> + ?Sized, B: Batch> {
    pub(super) learner: &'r mut Learner<'a, M, B>,
    pub(super) graphs: &'r mut Graphs<B, M::Output>,
    pub(super) context: &'r mut Context<'a>,
}

impl<M: Model<B> + ?Sized, B: Batch> Step<'_, '_, M, B> {
    /// Makes a step with this rank's batches, which may be none.
    pub(super) fn run(
        mut self,
        window: Window<B>,
        agreed: &Agreed,
        supply: &mut Supply<B>,
    ) -> Result<(), TrainerError> {
        let begin = Instant::now();
        let loaded = self.context.state.times.load;
        if agreed.count <= 0.0 {
            return Err(nothing_counts(self.context).into());
        }
        let computed = self.gradients(window, agreed, supply)?;
        // The work on the GPU has finished, or was aborted.
        nccl::check()?;
        let waits = self.learner.waits.clone();
        self.reduce_loss_and_metrics(&computed, agreed)?;
        self.note_bubble(begin);
        let unscaled = waits.over(|| self.learner.unscale(self.context, &computed))?;
        self.learner.clip(self.context, &computed);
        self.set_lr();
        self.context.call(Hook::BackwardEnd);
        if self.context.may_refuse_step {
            waits.over(|| self.context.add_up(&self.context.state.group, Vec::new()))?;
        }
        // This comes after the callbacks, which may have a better message.
        if self.context.settings.stop_on_nan && !self.context.state.loss.is_finite() {
            return Err(not_finite(self.context).into());
        }
        let optimizer = Instant::now();
        self.optimize(unscaled, &computed)?;
        self.context.tracer.span("optimizer", Track::Compute, optimizer);
        let times = &mut self.context.state.times;
        let (waited, loaded) = (waits.take(), times.load - loaded);
        times.comm += waited;
        times.compute += begin.elapsed().saturating_sub(waited + loaded);
        self.count();
        Ok(())
    }

    fn gradients(
        &mut self,
        window: Window<B>,
        agreed: &Agreed,
        supply: &mut Supply<B>,
    ) -> Result<Computed, TrainerError> {
        let mode = StepMode::of(agreed);
        if mode == StepMode::Eager {
            self.context.state.optimizer.zero_grad()?;
        }
        self.learner.begin_step(agreed)?;
        self.learner.masks.set_step(self.context.state.step + 1)?;
        self.learner.scores.reset();
        match mode {
            StepMode::Eager => self.learner.gradients(self.context, window.batches, agreed),
            StepMode::Graph => {
                let step = GraphStep { window, agreed, supply };
                self.graphs.gradients(self.learner, self.context, step)
            }
        }
    }

    /// The loss and the metrics of the step, over all ranks.
    fn reduce_loss_and_metrics(&mut self, computed: &Computed, agreed: &Agreed) -> Result<(), TrainerError> {
        let scores = &self.learner.scores;
        let own = [&[computed.sum], &scores.sums()[..]].concat();
        let (ranks, begin) = (self.learner.scored_by(), Instant::now());
        let sums = self.learner.waits.over(|| self.context.add_up(ranks, own))?;
        if self.learner.pipeline.is_some() {
            self.context.tracer.span(pipeline_trace::LAST_BUBBLE, Track::Compute, begin);
        }
        let state = &mut self.context.state;
        state.loss = sums[0] / agreed.count;
        state.train_metrics = scores.values_of(&sums[1..]);
        state.samples = agreed.samples;
        state.count = agreed.count;
        Ok(())
    }

    /// Stores the share of the step in which this rank's stages computed nothing. It is called when all ranks are done with
    /// forward and backward. On a GPU the share is unknown, because computations are only launched.
    fn note_bubble(&mut self, begin: Instant) {
        let Some(pipeline) = self.learner.pipeline.as_ref().filter(|_| !self.learner.device.is_cuda()) else {
            return;
        };
        let share = pipeline.busy().as_secs_f64() / begin.elapsed().as_secs_f64().max(1e-9);
        self.context.state.bubble = Some((1.0 - share).clamp(0.0, 1.0));
    }

    /// Sets the learning rate of this step, if there is a schedule.
    fn set_lr(&mut self) {
        let Some(schedule) = &self.learner.schedule else { return };
        let state = &mut self.context.state;
        let (lr, betas) = (schedule.lr(state.at()), schedule.betas(state.at()));
        if let Some((beta1, beta2)) = betas {
            match state.optimizer.set_betas(beta1, beta2) {
                // A graph of the optimizer's step would keep those of its recording.
                Ok(has_betas) if has_betas && self.learner.betas != Some((beta1, beta2)) => {
                    state.is_optimizer_changed = true;
                    self.graphs.note_betas(state.rank());
                    self.learner.betas = Some((beta1, beta2));
                }
                Ok(_) => {}
                Err(error) => self.context.hooks.note(error.into()),
            }
        }
        if lr.is_finite() {
            state.set_lr(lr);
        } else {
            let text = format!("the schedule's learning rate for step {} is {lr}", state.step + 1);
            self.context.hooks.note(text.into());
        }
    }

    /// Updates the weights, unless gradients have overflowed.
    fn optimize(&mut self, unscaled: Option<Unscaled>, computed: &Computed) -> Result<(), TrainerError> {
        if let Some(unscaled) = unscaled {
            return self.learner.step_unscaled(self.context, unscaled);
        }
        let made = if self.context.state.has_overflowed { StepMade::Skipped } else { StepMade::Yes };
        if made == StepMade::Yes {
            if computed.by_graph.is_some() {
                self.graphs.step_optimizer(self.learner, self.context)?;
            } else {
                self.learner.engine.step(&mut *self.context.state.optimizer)?;
                self.learner.has_stepped = true;
            }
        }
        if let Some(rescaled) = computed.by_graph.and_then(|graph| graph.rescaled) {
            self.context.state.note_scale(made, rescaled.scale);
        }
        Ok(())
    }

    fn count(&mut self) {
        let context = &mut *self.context;
        context.is_unsaved = true;
        let state = &mut context.state;
        state.step += 1;
        state.step_in_epoch += 1;
        state.samples_per_s = state.samples as f64 / context.clock.lap().as_secs_f64().max(1e-9);
        state.requests.validation |= context.settings.validate_every.is_at_step(state.step);
        context.call(Hook::StepEnd);
        context.call(Hook::BatchEnd);
        if context.tracer.is_over(context.state.step) {
            context.write_trace();
        }
    }
}

/// Every rank finds this by itself, because the loss is the same on all.
fn not_finite(context: &Context<'_>) -> SharedFailure {
    let state = &context.state;
    SharedFailure::on_all_ranks(format!(
        "the loss is {} at step {} (epoch {}, lr {}); the weights are those of the step before; \
         try a smaller learning rate, or a warm-up; stop_on_nan(false) continues",
        state.loss,
        state.step + 1,
        state.epoch + 1,
        state.lr()
    ))
}

/// Every rank finds this by itself, because the counts are the same on all.
fn nothing_counts(context: &Context<'_>) -> SharedFailure {
    SharedFailure::on_all_ranks(format!(
        "step {}: the loss counts none of its samples or tokens; try data without such batches, or another class to ignore",
        context.state.step + 1
    ))
}
