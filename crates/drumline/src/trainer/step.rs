//! One step: the batches of a window, one reduction, the optimizer.
//!
//! A rank that has trouble, or no batch, takes part with nothing; whether the step is made is known to all before a weight is touched.

use std::sync::Arc;
use std::time::Instant;

use drumline_comm::{ReduceOp, on_behalf_of};
use drumline_observe::trace::Track;
use drumline_parallel::ParallelError;
use drumline_torch::{Autocast, StepMade, TorchError, Unscaled, clip_grad_norm, nccl};
use tch::{Tensor, no_grad};

use super::batch::Batch;
use super::error::TrainerError;
use super::hooks::Hook;
use super::meeting::Agreed;
use super::model::{Mode, Model};
use super::run::Run;
use super::supply::{Supply, Window};
use super::way::Way;
use crate::loader::Cause;
use crate::shared_failure::{SharedFailure, guarded};

/// What forward and backward of a step have left beside gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Computed {
    /// Of this rank's losses.
    pub(super) sum: f64,
    /// How they were made: a recording that failed leads back to steps as they are.
    pub(super) way: Way,
    /// In fp16, by a graph.
    pub(super) rescaled: Option<Rescaled>,
    /// That of the gradients before they were clipped, by a graph.
    pub(super) norm: Option<f64>,
}

/// What a graph has found, which has unscaled the gradients and moved the scale on; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rescaled {
    pub(super) has_overflowed: bool,
    /// Of the next step.
    pub(super) scale: f64,
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// Makes a step of this rank's batches, which may be none.
    pub(super) fn step(
        &mut self,
        window: Window<B>,
        agreed: &Agreed,
        supply: &mut Supply<B>,
    ) -> Result<(), TrainerError> {
        self.rehearsal.at(self.state.step + 1, &self.state.group);
        let (begin, loaded) = (Instant::now(), self.state.times.load);
        if agreed.count <= 0.0 {
            return Err(self.nothing_counts().into());
        }
        let way = Way::of(agreed);
        if way == Way::Eager {
            self.state.optimizer.zero_grad()?;
        }
        let waits = Arc::clone(&self.waits);
        let begin_step = || self.ddp.begin_step(agreed.buffers_of.unwrap_or(0));
        waits.over(|| on_behalf_of(self.site, begin_step))?;
        waits.over(|| self.norms.share(&self.state.group, agreed))?;
        self.train_scores.reset();
        let computed = match way {
            Way::Eager => self.gradients(window.batches, agreed)?,
            Way::Graphs => self.graphed_gradients(window, agreed, supply)?,
        };
        // What the GPU had to do is done, or was given up.
        nccl::check()?;
        let own = [&[computed.sum], &self.train_scores.sums()[..]].concat();
        let sums = waits.over(|| self.add_up(own))?;
        self.state.loss = sums[0] / agreed.count;
        self.state.train_metrics = self.train_scores.values_of(&sums[1..]);
        (self.state.samples, self.state.count) = (agreed.samples, agreed.count);
        let unscaled = waits.over(|| self.unscale(&computed))?;
        self.clip(&computed);
        self.hooks.call(Hook::BackwardEnd, &mut self.state);
        if self.has_callbacks {
            waits.over(|| self.add_up(Vec::new()))?;
        }
        // Behind the callbacks, which may have better words for it.
        if self.settings.stop_on_nan && !self.state.loss.is_finite() {
            return Err(self.no_number().into());
        }
        let optimizer = Instant::now();
        self.optimize(unscaled, &computed)?;
        self.tracer.span("optimizer", Track::Compute, optimizer);
        let (waited, loaded) = (waits.take(), self.state.times.load - loaded);
        self.state.times.comm += waited;
        self.state.times.compute += begin.elapsed().saturating_sub(waited + loaded);
        self.count_step();
        self.hooks.call(Hook::StepEnd, &mut self.state);
        self.hooks.call(Hook::BatchEnd, &mut self.state);
        if self.tracer.is_over(self.state.step) {
            self.write_trace();
        }
        Ok(())
    }

    /// The gradients of the mean loss over all samples of all ranks.
    pub(super) fn gradients(&mut self, batches: Vec<B>, agreed: &Agreed) -> Result<Computed, TrainerError> {
        // Sums over this rank's samples are averaged over ranks by the reduction.
        let factor = self.state.group.size() as f64 / agreed.count;
        let (mut sum, mut done) = (0.0, 0);
        for batch in batches {
            let Some(loss) = self.loss_of(batch)? else { break };
            let begin = Instant::now();
            let part = &loss * factor;
            let backward = || self.backward(&part);
            done += 1;
            if done < agreed.most_batches {
                self.ddp.no_sync(backward)?
            } else {
                backward()?
            }
            self.tracer.span("backward", Track::Compute, begin);
            self.norms.learn(done);
            sum += loss.f_double_value(&[]).map_err(TorchError::from)?;
        }
        if done < agreed.most_batches {
            self.norms.shadow(agreed.most_batches - done - 1)?;
            on_behalf_of(self.site, || self.ddp.backward_nothing_beside(self.norms.calls()))?;
            // There is no loss to wait for.
            nccl::settle(self.state.device)?;
        }
        Ok(Computed { sum, way: Way::Eager, rescaled: None, norm: None })
    }

    /// Backward from a part of the mean loss, in fp16 from a scaled one.
    pub(super) fn backward(&self, part: &Tensor) -> Result<(), ParallelError> {
        let backward = |part: &Tensor| on_behalf_of(self.site, || self.ddp.backward(part));
        match &self.scaler {
            None => backward(part),
            Some(scaler) => scaler.backward_with(part, backward).map(drop),
        }
    }

    /// In fp16, gradients as those of the loss itself; whether they have overflowed is the same on all ranks.
    fn unscale(&mut self, computed: &Computed) -> Result<Option<Unscaled>, TrainerError> {
        let Some(scaler) = &self.scaler else { return Ok(None) };
        if let Some(rescaled) = computed.rescaled {
            self.state.has_overflowed = rescaled.has_overflowed;
            return Ok(None);
        }
        let mut unscaled = scaler.received().unscale(scaler, self.state.parameters.clone())?;
        unscaled.agree(&self.state.group)?;
        self.state.has_overflowed = unscaled.has_overflowed()?;
        Ok(Some(unscaled))
    }

    /// Holds gradients within the bounds that callbacks ask for, unless a graph has done it.
    fn clip(&mut self, computed: &Computed) {
        if self.state.has_overflowed {
            return; // There is no norm, and no step.
        }
        let norm = match computed.way {
            Way::Graphs if computed.norm.is_none_or(f64::is_finite) => Ok(computed.norm),
            // Where a graph has found no number, this finds out whose.
            _ => guarded(|| {
                let norms = self
                    .hooks
                    .gradient_clips()
                    .map(|clip| clip.apply(&self.state.parameters, clip_grad_norm));
                Ok(norms.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next())
            }),
        };
        match norm {
            Ok(norm) => self.state.train_metrics.extend(norm.map(|norm| ("grad_norm".to_owned(), norm))),
            Err(trouble) => self.hooks.note(trouble),
        }
    }

    /// Changes the weights, unless gradients have overflowed.
    fn optimize(&mut self, unscaled: Option<Unscaled>, computed: &Computed) -> Result<(), TrainerError> {
        if let (Some(unscaled), Some(scaler)) = (unscaled, &mut self.scaler) {
            let made = unscaled.step(scaler, &mut *self.state.optimizer)?;
            self.has_stepped |= made == StepMade::Yes;
            let scale = scaler.scale()?;
            self.tell_scale(made, scale);
            return Ok(());
        }
        let made = if self.state.has_overflowed { StepMade::Skipped } else { StepMade::Yes };
        match (made, computed.way) {
            (StepMade::Skipped, _) => {}
            (StepMade::Yes, Way::Eager) => {
                self.state.optimizer.step()?;
                self.has_stepped = true;
            }
            (StepMade::Yes, Way::Graphs) => self.graphed_optimizer()?,
        }
        if let Some(Rescaled { scale, .. }) = computed.rescaled {
            self.tell_scale(made, scale);
        }
        Ok(())
    }

    /// Counts a step that was left out, and tells the scale of the next.
    fn tell_scale(&mut self, made: StepMade, scale: f64) {
        self.state.skipped += u64::from(made == StepMade::Skipped);
        let figures = [("loss_scale", scale), ("skipped_steps", self.state.skipped as f64)];
        self.state.train_metrics.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    }

    /// The summed loss of a batch, with the way back to the weights; `None` where there is trouble, which is noted.
    fn loss_of(&mut self, batch: B) -> Result<Option<Tensor>, TrainerError> {
        self.hooks.call(Hook::BatchBegin, &mut self.state);
        let device = self.state.device;
        let made = guarded(|| {
            let batch = batch.to_device(device)?;
            let _autocast = self.autocast()?;
            let begin = Instant::now();
            let output = self.ddp.forward_with(|model| model.forward_batch(&batch, Mode::Train))??;
            self.tracer.span("forward", Track::Compute, begin);
            Ok((output, batch))
        });
        let made = made.map(|(output, batch)| {
            self.hooks.call(Hook::LossBegin, &mut self.state);
            guarded(|| {
                let _autocast = self.autocast()?;
                no_grad(|| self.train_scores.update(&output, &batch))?;
                self.loss.sum(&output, &batch)
            })
        });
        match made.and_then(|loss| loss) {
            Err(trouble) => {
                let trouble = trouble.within(&format!("step {}", self.state.step + 1));
                self.norms.can_go_on(&trouble)?;
                self.hooks.note(trouble);
            }
            Ok(loss) => {
                self.hooks.call(Hook::BackwardBegin, &mut self.state);
                return Ok(Some(loss));
            }
        }
        Ok(None)
    }

    /// In fewer bits, if that is wanted, until this is dropped.
    pub(super) fn autocast(&self) -> Result<Option<Autocast>, Cause> {
        let kind = self.settings.precision.autocast();
        Ok(kind.map(|kind| Autocast::new(self.state.device, kind)).transpose()?)
    }

    /// What the ranks have, added up; an error on all of them if one has trouble.
    fn add_up(&mut self, mut sums: Vec<f64>) -> Result<Vec<f64>, TrainerError> {
        sums.push(f64::from(u8::from(self.hooks.trouble().is_some())));
        on_behalf_of(self.site, || self.state.group.all_reduce(&mut sums, ReduceOp::Sum))?;
        if sums.pop() > Some(0.0) {
            self.check()?;
        }
        Ok(sums)
    }

    fn count_step(&mut self) {
        self.place.turns += 1;
        self.is_unsaved = true;
        self.state.step += 1;
        self.state.step_in_epoch += 1;
        self.state.samples_per_s = self.state.samples as f64 / self.clock.lap().as_secs_f64().max(1e-9);
        self.state.requests.validation |= self.settings.validate_every.is_at_step(self.state.step);
    }

    /// The loss is the same on all ranks, so that each finds this by itself.
    fn no_number(&self) -> SharedFailure {
        let (loss, step, epoch, lr) =
            (self.state.loss, self.state.step + 1, self.state.epoch + 1, self.state.lr());
        SharedFailure::alike(format!(
            "the loss is {loss} at step {step} (epoch {epoch}, lr {lr}); the weights are those of the step before; \
             try a smaller learning rate, or a warm-up; stop_on_nan(false) trains on"
        ))
    }

    /// Found by every rank in the same numbers.
    fn nothing_counts(&self) -> SharedFailure {
        SharedFailure::alike(format!(
            "step {}: the loss counts none of its samples or tokens; try data without such batches, or another class to ignore",
            self.state.step + 1
        ))
    }
}
