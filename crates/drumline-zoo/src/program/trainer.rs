//! The state of a training run, and what is done with it: an epoch, an evaluation, a checkpoint.

use anyhow::anyhow;
use drumline::checkpoint::{Checkpoints, Mark};
use drumline::{ImageBatch, Loader, LrSchedule, SamplerPosition, Schedule};
use drumline_observe::bar::{At, Figure, Pace, Progress};
use drumline_observe::events::{EvalEvent, Event, EventLog, StepEvent, metrics};
use drumline_torch::{Optimizer, Sgd};
use tch::nn::VarStore;
use tch::{Device, Kind};

use super::evaluate::{Evaluation, Replica};
use super::failure::Shared;
use super::job::{Job, Vote};
use super::pieces::{self, Images};
use super::step::Sums;
use crate::config::Config;

pub(super) struct Trainer<'a> {
    pub(super) job: &'a Job,
    pub(super) config: &'a Config,
    pub(super) device: Device,
    pub(super) store: VarStore,
    pub(super) replica: Replica,
    pub(super) optimizer: Sgd,
    pub(super) schedule: LrSchedule,
    pub(super) train: Loader<Images>,
    pub(super) evaluation: Evaluation,
    pub(super) checkpoints: Checkpoints,
    /// On rank 0 only.
    pub(super) log: Option<EventLog>,
    pub(super) progress: Progress,
    pub(super) at: Position,
}

/// How far the run is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Position {
    /// Epochs done.
    pub(super) epoch: u64,
    /// Steps done in the epoch that is under way.
    pub(super) in_epoch: u64,
    /// Steps done.
    pub(super) step: u64,
    /// Steps after which the last checkpoint was written.
    pub(super) saved: Option<u64>,
    /// Best accuracy so far, in percent.
    pub(super) best: f64,
    /// The samples that are done.
    pub(super) sampler: SamplerPosition,
}

/// Why an epoch is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EpochEnd {
    /// All its samples were seen.
    Finished,
    /// `TRAIN.MAX_STEPS` were made.
    MaxSteps,
    /// A signal asked for it.
    Stopped,
}

impl Trainer<'_> {
    /// Trains to the end of the epoch, or as far as it may go.
    pub(super) fn train_epoch(&mut self) -> anyhow::Result<EpochEnd> {
        let at = drumline::At { epoch: self.at.epoch as f64, step: self.at.step };
        let lr = self.schedule.lr(at);
        self.optimizer.set_lr(lr);
        self.progress.begin_epoch(self.place());
        let mut batches = self.job.agree(self.train.resume(self.at.sampler).map_err(Into::into))?;
        let mut pace = Pace::new();
        let mut sums = Sums::default();
        while self.config.train.max_steps.is_none_or(|most| self.at.step < most) {
            let batch = batches.next().transpose();
            let own = match &batch {
                Ok(Some(_)) => Vote::GoOn,
                Ok(None) => Vote::Ended,
                Err(_) => Vote::Failed,
            };
            match self.job.vote(own)? {
                Vote::GoOn => {}
                Vote::Ended => return Ok(self.end_epoch()),
                Vote::Stop => return Ok(EpochEnd::Stopped),
                Vote::Failed => {
                    self.job.agree(batch.as_ref().map(drop).map_err(|error| anyhow!("{error}")))?
                }
            }
            let batch = batch?.expect("no rank has voted that its batches are at their end");
            let step = self.step(&batch.to_device(self.device)?, lr)?;
            self.at.sampler = batches.sampler_position();
            sums += step;
            pace.step(step.samples());
            self.tell(&step, &sums, lr, &pace)?;
        }
        Ok(EpochEnd::MaxSteps)
    }

    /// Forward, backward with the mean of all ranks' gradients, optimizer. The figures are those of all ranks.
    fn step(&mut self, batch: &ImageBatch, lr: f64) -> anyhow::Result<Sums> {
        let output = self.replica.forward(&batch.images)?;
        let loss = output.cross_entropy_for_logits(&batch.labels);
        self.optimizer.zero_grad()?;
        self.replica.backward(&loss)?;
        let own = Sums::of(&output, &batch.labels, &loss.to_kind(Kind::Double), self.config.train.topk);
        let all = own.reduced(&self.job.group)?;
        if !all.loss().is_finite() {
            return Err(self.not_finite(&all, lr)?);
        }
        self.optimizer.step()?;
        self.at.step += 1;
        self.at.in_epoch += 1;
        Ok(all)
    }

    /// Found by every rank in the same numbers, before the weights are touched.
    fn not_finite(&mut self, step: &Sums, lr: f64) -> anyhow::Result<anyhow::Error> {
        let Position { epoch, in_epoch, step: done, saved, .. } = self.at;
        let loss = step.loss();
        self.write(&Event::Step(StepEvent { step: done + 1, ..self.step_event(step, lr, 0.0) }))?;
        self.progress.finish();
        let kept = match saved {
            Some(at) => {
                format!("the checkpoint after step {at} is kept in {}", self.config.run.out_dir.display())
            }
            None => "no checkpoint was written yet".to_owned(),
        };
        Ok(Shared::alike(format!(
            "the loss is {loss} at step {} (epoch {}, batch {} of {}, lr {lr}); {kept}; \
             try a smaller OPTIM.BASE_LR or more OPTIM.WARMUP_EPOCHS",
            done + 1,
            epoch + 1,
            in_epoch + 1,
            self.train.num_batches(),
        ))
        .into())
    }

    fn tell(&mut self, step: &Sums, sums: &Sums, lr: f64, pace: &Pace) -> anyhow::Result<()> {
        self.write(&Event::Step(self.step_event(step, lr, pace.last())))?;
        let figures = figures(sums.loss(), sums.acc1(), lr, pace.mean());
        self.progress.step(self.place(), &figures, Some(pace.left(self.steps_left())));
        Ok(())
    }

    fn step_event(&self, step: &Sums, lr: f64, samples_per_s: f64) -> StepEvent {
        StepEvent {
            step: self.at.step,
            epoch: self.at.epoch,
            loss: step.loss(),
            lr,
            samples: step.samples(),
            samples_per_s,
            metrics: metrics([("acc1", step.acc1())]),
        }
    }

    /// Evaluates on the test set and remembers the best; `None` if a signal asked for the end.
    pub(super) fn evaluate(&mut self) -> anyhow::Result<Option<IsBest>> {
        let k = self.config.train.topk;
        let Some(sums) = self.evaluation.run(self.job, &self.replica)? else { return Ok(None) };
        let is_best = sums.acc1() > self.at.best;
        self.at.best = self.at.best.max(sums.acc1());
        let Position { epoch, step, best, .. } = self.at;
        let (acc1, acck, loss, samples) = (sums.acc1(), sums.acck(), sums.loss(), sums.samples());
        let figures = [("acc1", acc1), ("acck", acck), ("k", k as f64), ("loss", loss)];
        self.write(&Event::Eval(EvalEvent { epoch, step, samples, metrics: metrics(figures) }))?;
        self.progress.say(&format!(
            "   == eval: [{epoch}/{}] | loss: {loss:.3} | Acc@1 {acc1:.3} | Acc@{k} {acck:.3} | best Acc@1 {best:.3} | {samples} images",
            self.config.optim.max_epoch
        ));
        Ok(Some(if is_best { IsBest::Yes } else { IsBest::No }))
    }

    /// Writes a checkpoint that the run can go on from.
    pub(super) fn save(&mut self, is_best: IsBest) -> anyhow::Result<()> {
        let config = self.config.to_yaml().into();
        let state = self.job.agree(pieces::state(&self.store, &self.optimizer, &self.at, config))?;
        let mark = if is_best == IsBest::Yes { Mark::Best } else { Mark::Latest };
        self.checkpoints.save(&state, mark, &self.job.group)?;
        self.at.saved = Some(self.at.step);
        Ok(())
    }

    fn end_epoch(&mut self) -> EpochEnd {
        self.at.epoch += 1;
        self.at.in_epoch = 0;
        self.at.sampler = self.train.sampler().start(self.at.epoch);
        EpochEnd::Finished
    }

    pub(super) fn write(&mut self, event: &Event) -> anyhow::Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.write(event))?;
        Ok(())
    }

    fn place(&self) -> At {
        let (epochs, steps) = (self.config.optim.max_epoch, self.train.num_batches() as u64);
        At { epoch: self.at.epoch, epochs, step: self.at.in_epoch, steps }
    }

    fn steps_left(&self) -> u64 {
        let whole = self.config.optim.max_epoch * self.train.num_batches() as u64;
        let last = self.config.train.max_steps.map_or(whole, |most| most.min(whole));
        last.saturating_sub(self.at.step)
    }
}

/// Whether an evaluation was better than all before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IsBest {
    Yes,
    No,
}

/// What a person sees of an epoch so far.
fn figures(loss: f64, acc1: f64, lr: f64, images_per_s: f64) -> [Figure<'static>; 4] {
    [
        Figure::new("loss", format!("{loss:.3}")),
        Figure::new("acc", format!("{acc1:6.3}%")),
        Figure::new("lr", format!("{lr:.4}")).in_lines_only(),
        Figure::unnamed(format!("{images_per_s:.0} img/s")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_observe::bar::step_line;
    use std::time::Duration;

    #[test]
    fn lines_are_as_in_the_tutorial() {
        let at = At { epoch: 1, epochs: 5, step: 25, steps: 149 };
        let line = step_line(at, &figures(1.4641, 47.3912, 0.02, 812.4), Some(Duration::from_secs(3_723)));
        let expected = "   == step: [ 25/149] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 1:02:03";
        assert_eq!(line, expected);
    }
}
