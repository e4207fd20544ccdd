//! Checkpoints of a training: saved, resumed from, and the best one loaded at the end.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use drumline_torch::{RngState, nccl};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batch::Batch;
use super::error::TrainerError;
use super::model::Model;
use super::run::{Place, Run};
use super::settings::Every;
use super::state::Best;
use crate::checkpoint::{BestSaved, Checkpoints, Loaded, Mark, Scalar, Score, TrainState, named, restore};
use crate::loader::Cause;
use crate::sampler::SamplerPosition;
use crate::scaling::KeptScale;
use crate::shared_failure::{SharedFailure, Trouble, agree, in_words};

/// What a checkpoint keeps beside weights, optimizer and position.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    best: Option<KeptBest>,
    /// Steps after which the last evaluation was made.
    #[serde(default)]
    evaluated_at: Option<u64>,
    /// The metrics of the best checkpoints, the best first.
    #[serde(default)]
    kept_best: Vec<Scalar>,
    #[serde(default)]
    callbacks: BTreeMap<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptBest {
    metric: Scalar,
    step: u64,
    epoch: u64,
}

impl Kept {
    fn of(saved: &TrainState) -> Result<Self, serde_json::Error> {
        match &saved.schedule {
            Value::Null => Ok(Self::default()),
            kept => Self::deserialize(kept),
        }
    }
}

/// Whether a trainer's checkpoint has the evaluation of its step. One that was saved when a signal cut the evaluation short has not: the training
/// that goes on from it makes it, also where no step is left to do.
pub fn was_evaluated(checkpoint: &Loaded) -> bool {
    let saved = &checkpoint.state;
    Kept::of(saved).is_ok_and(|kept| kept.evaluated_at == Some(saved.step))
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// Saves where the training is; all ranks together. Nothing where there is no folder.
    pub(super) fn save(&mut self) -> Result<(), TrainerError> {
        self.with_evaluation_weights(Self::save_evaluated)
    }

    /// The same while the weights that are evaluated are the model's.
    fn save_evaluated(&mut self) -> Result<(), TrainerError> {
        self.state.requests.checkpoint = false;
        let mark = self.place_among_best.take().map_or(Mark::Latest, Mark::Place);
        let Some(checkpoints) = self.checkpoints.clone() else { return Ok(()) };
        self.ddp.sync_buffers()?;
        let settled = nccl::settle(self.state.device).map_err(Cause::from);
        let state = settled.and_then(|()| self.to_checkpoint()).map_err(Trouble::from);
        let state = agree::<_, TrainerError>(&self.state.group, state)?;
        match checkpoints.save(&state, mark, &self.state.group) {
            Ok(saved) => self.state.checkpoint = Some(saved.path),
            Err(error) => {
                // It is not tried again on the way out.
                self.checkpoints = None;
                return Err(error.into());
            }
        }
        self.state.saved_at = Some(self.state.step);
        self.is_unsaved = false;
        self.clock.restart();
        Ok(())
    }

    /// The state after the last step, once.
    pub(super) fn save_unless_saved(&mut self) -> Result<(), TrainerError> {
        if self.is_unsaved { self.save() } else { Ok(()) }
    }

    /// Training has failed on all ranks alike: what was reached is kept. If that fails, too, it is only told.
    pub(super) fn rescue(&mut self) {
        // With a loss that is no number the norms' means are none either: the checkpoint before is worth more.
        if self.state.step == self.state.resumed_at.unwrap_or(0) || !self.state.loss.is_finite() {
            return;
        }
        if let Err(error) = self.save_unless_saved() {
            tracing::error!("cannot save what was reached: {}", in_words(&error));
        }
    }

    pub(super) fn set_kept(&mut self) {
        if let Some(num) = self.state.requests.keep_last.and_then(NonZeroUsize::new) {
            self.checkpoints = self.checkpoints.take().map(|checkpoints| checkpoints.keep_last(num));
        }
        if let Some(num) = self.state.requests.keep_best.and_then(NonZeroUsize::new) {
            self.checkpoints = self.checkpoints.take().map(|checkpoints| checkpoints.keep_best(num));
        }
    }

    fn to_checkpoint(&self) -> Result<TrainState, Cause> {
        let best = self.state.best.map(|Best { metric, step, epoch }| KeptBest {
            metric: Scalar(metric),
            step,
            epoch,
        });
        let evaluated_at =
            self.state.evaluation.as_ref().map(|evaluation| evaluation.step).or(self.evaluated_at);
        let kept_best = self.kept_best.iter().copied().map(Scalar).collect();
        let kept = Kept { best, evaluated_at, kept_best, callbacks: self.hooks.state() };
        Ok(TrainState {
            optimizer: self.state.optimizer.state(),
            epoch: self.state.epoch,
            step: self.state.step,
            sampler: serde_json::to_value(self.position())?,
            schedule: serde_json::to_value(kept)?,
            best: self.state.best.map(|best| best.metric),
            score: self.own_score(),
            // Before the first step of this run there is none.
            loss: (self.state.count > 0.0).then_some(self.state.loss),
            config: serde_json::to_value(&self.state.config)?,
            rng: RngState::capture()?,
            scaler: KeptScale::new(self.scaler.as_ref(), self.state.skipped)?.to_value()?,
            trained: self.trained_beside()?,
            ..TrainState::new(named(self.store))?
        })
    }

    /// What the evaluation of this step has found.
    fn own_score(&self) -> Option<Score> {
        let evaluation = self.state.evaluation.as_ref().filter(|done| done.step == self.state.step)?;
        let value = evaluation.metric(self.key.name())?;
        Some(Score { value, smaller_is_better: self.key.smaller_is_better() })
    }

    /// Where the epoch is, the same on all ranks: also where their shares differ.
    fn position(&self) -> SamplerPosition {
        let Place { from, turns } = self.place;
        let sampler = self.train.sampler();
        let position = from.after(turns * self.positions_of_turn(), sampler.num_replicas());
        let all = sampler.num_positions(from.epoch);
        SamplerPosition { samples_seen: position.samples_seen.min(all), ..position }
    }

    /// What a rank takes of the epoch's order in a step: samples, or planned batches.
    fn positions_of_turn(&self) -> usize {
        let of_batch = self.train.sampler().positions_of_batch(self.settings.batch_size_per_gpu);
        of_batch * self.settings.update_every
    }

    /// Goes on from the latest checkpoint, if that is wanted and there is one.
    pub(super) fn resume(&mut self) -> Result<(), TrainerError> {
        let found = match (self.loaded.take(), self.settings.resume_from.clone()) {
            (None, Some(folder)) => self.checkpoints_in(&folder).load_latest(&self.state.group)?,
            (loaded, _) => loaded,
        };
        let Some(found) = found else { return Ok(()) };
        self.warn(found.of_new_ranks(&self.state.group));
        let gone_on = self.go_on(&found);
        self.resumed_from = found.path.parent().map(Into::into);
        // Rank 0's folder counts, where the others know it by another name.
        let own = self.checkpoints.as_ref().zip(self.resumed_from.as_ref());
        let mut is_saved = [u8::from(own.is_some_and(|(own, folder)| own.is_in(folder)))];
        self.state.group.broadcast(&mut is_saved, 0)?;
        let is_saved = is_saved[0] > 0;
        self.state.saved_at = is_saved.then_some(found.state.step);
        self.state.checkpoint = Some(found.path.clone());
        self.is_unsaved = !is_saved;
        let gone_on = gone_on.map_err(|cause| {
            Trouble::from(cause).within(&format!("cannot resume from {}", found.path.display()))
        });
        agree::<_, TrainerError>(&self.state.group, gone_on)?;
        self.count_epoch()?;
        self.ask_for_missing_evaluation();
        Ok(())
    }

    /// The run's own checkpoints, if they are in this folder; those of another run are only read.
    fn checkpoints_in(&self, folder: &Path) -> Checkpoints {
        let own = self.checkpoints.clone().filter(|own| own.is_in(folder));
        own.unwrap_or_else(|| Checkpoints::new(folder).read_only())
    }

    /// Warns on rank 0, in the run's log, too.
    fn warn(&self, text: Option<String>) {
        let Some(text) = text.filter(|_| self.state.rank() == 0) else { return };
        match &self.checkpoints {
            Some(checkpoints) => checkpoints.warn(&text),
            None => tracing::warn!("{text}"),
        }
    }

    /// One that was due after the checkpoint's last step. That of an epoch's end is made when the epoch is ended again.
    fn ask_for_missing_evaluation(&mut self) {
        let (every, state) = (self.settings.validate_every, &mut self.state);
        let is_last = state.is_enough() && state.step_in_epoch > 0 && every != Every::Never;
        let is_due = every.is_at_step(state.step) || is_last;
        state.requests.validation = is_due && self.evaluated_at != Some(state.step);
    }

    /// The position of a checkpoint, on this run's data.
    fn position_of(&self, saved: &TrainState) -> Result<SamplerPosition, Cause> {
        let from: SamplerPosition = serde_json::from_value(saved.sampler.clone())?;
        from.check_seed(self.train.sampler().seed())?;
        let checked = self.data.map_or(Ok(()), |now| from.check_data(now));
        match checked {
            Err(error) if self.settings.accept_new_data => {
                self.warn(Some(format!("{error}; it was accepted, and the epoch continues at its position")))
            }
            checked => checked?,
        }
        let all = self.train.sampler().num_positions(from.epoch);
        Ok(SamplerPosition { samples_seen: from.samples_seen.min(all), data: self.data, ..from })
    }

    fn go_on(&mut self, found: &Loaded) -> Result<(), Cause> {
        let saved = &found.state;
        let from = self.position_of(saved)?;
        let (kept, scale) = (Kept::of(saved)?, KeptScale::of(&saved.scaler)?);
        self.load_weights(saved)?;
        self.state.optimizer.load_state(&saved.optimizer)?;
        scale.load_into(self.scaler.as_mut())?;
        self.state.skipped = scale.skipped;
        self.hooks.load_state(&kept.callbacks)?;
        saved.rng.restore()?;
        let of_step = self.positions_of_turn() * self.train.sampler().num_replicas().max(1);
        self.place = Place { from, turns: 0 };
        self.state.step_in_epoch = from.samples_seen.div_ceil(of_step) as u64;
        (self.state.epoch, self.state.step) = (saved.epoch, saved.step);
        self.state.best =
            kept.best.map(|KeptBest { metric, step, epoch }| Best { metric: metric.0, step, epoch });
        self.kept_best = kept.kept_best.into_iter().map(|metric| metric.0).collect();
        if self.kept_best.is_empty() {
            self.kept_best.extend(self.state.best.map(|best| best.metric));
        }
        if let Some(left) = &found.best_left {
            self.take_best(left);
        }
        self.state.resumed_at = Some(saved.step);
        self.evaluated_at = kept.evaluated_at;
        Ok(())
    }

    /// Where best checkpoints were lost, those that are left are the best: what was lost must not keep worse ones from being kept.
    fn take_best(&mut self, left: &[BestSaved]) {
        let metric = |best: &BestSaved| best.score.map(|score| score.value);
        self.state.best = left
            .first()
            .and_then(|best| Some(Best { metric: metric(best)?, step: best.step, epoch: best.epoch }));
        self.kept_best = left.iter().map_while(metric).collect();
    }

    /// The best model's weights become the model's.
    pub(super) fn load_best(&mut self) -> Result<(), TrainerError> {
        if let Some(weights) = self.best_weights.take() {
            return Ok(restore(&named(self.store), &weights)?);
        }
        let Some(best) = self.state.best else { return Ok(()) };
        // It may be one of before, and then be where that was saved.
        let others = self.resumed_from.as_ref().map(|folder| self.checkpoints_in(folder));
        for checkpoints in self.checkpoints.clone().into_iter().chain(others) {
            let found = checkpoints.load_best(&self.state.group)?;
            if let Some(found) = found.filter(|found| found.state.step == best.step) {
                let restored = restore(&named(self.store), &found.state.model);
                return agree(&self.state.group, restored.map_err(Trouble::from));
            }
        }
        Err(SharedFailure::alike(format!(
            "the best model, of step {}, is in none of the folders that this training knows; the last weights stay; \
             try the save_path of the training that it goes on from",
            best.step
        ))
        .into())
    }
}
