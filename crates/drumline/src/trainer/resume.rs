//! Loads checkpoints of a training: to resume, and for the best model at the end.
//!
//! Ranks that divide the state among them read only their own parts; otherwise rank 0 reads everything for all ranks.

use std::collections::HashSet;

use drumline_comm::ProcessGroup;

use super::batch::Batch;
use super::context::Context;
use super::error::TrainerError;
use super::learner::Learner;
use super::model::Model;
use super::save::{SavedTrainer, Saver};
use super::settings::Every;
use super::state::Best;
use super::train_data::TrainData;
use super::weights::{restore_held, trained_of};
use crate::checkpoint::{CheckpointError, Loaded, RunState, UnreadOptimizer, check_model, held_by};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::data::loader::Cause;
use crate::data::sampler::SamplerPosition;
use crate::scaling::SavedScale;

/// The name under which checkpoints kept the state of `ReduceOnPlateau` while it was a callback.
const PLATEAU_CALLBACK: &str = "ReduceOnPlateau";

/// The parts of a training that a checkpoint is loaded into.
pub(super) struct Resume<'r, 'a, M: Model<B> + ?Sized, B: Batch> {
    pub(super) saver: &'r mut Saver,
    pub(super) learner: &'r mut Learner<'a, M, B>,
    pub(super) data: &'r mut TrainData<B>,
    pub(super) context: &'r mut Context<'a>,
}

/// A checkpoint that matches this training.
struct Checked {
    /// The parts of it that this rank holds.
    state: RunState,
    from: SamplerPosition,
    section: SavedTrainer,
    scale: SavedScale,
}

/// A failure to resume from a checkpoint.
fn failed(cause: Cause, found: &Loaded) -> LocalFailure {
    LocalFailure::from(cause).within(&format!("cannot resume from {}", found.path.display()))
}

impl<M: Model<B> + ?Sized, B: Batch> Resume<'_, '_, M, B> {
    /// Resumes from a checkpoint that the program has loaded, or from the latest one of `resume_from`, if there is one.
    /// Returns whether the training has resumed.
    pub(super) fn run(mut self, loaded: Option<Loaded>) -> Result<bool, TrainerError> {
        let group = self.context.state.group.clone();
        let found = match (loaded, self.context.settings.resume_from.clone()) {
            (None, Some(folder)) => {
                let checkpoints = self.saver.checkpoints_in(&folder);
                if self.learner.reads_parts() {
                    checkpoints.find_latest(&group)?
                } else {
                    checkpoints.load_latest(&group)?
                }
            }
            (loaded, _) => loaded,
        };
        let Some(mut found) = found else { return Ok(false) };
        let is_in_memory = self.learner.engine.state_groups().is_empty();
        let optimizer = if is_in_memory { Ok(None) } else { found.take_optimizer() };
        let optimizer = optimizer.map_err(|cause| failed(cause.into(), &found));
        let optimizer = agree::<_, TrainerError>(&group, optimizer)?;
        let read = read_parts(self.learner, &mut found, &group).map_err(|cause| failed(cause.into(), &found));
        agree::<_, TrainerError>(&group, read)?;
        self.warn(found.rank_change_warning(&group));
        let checked = self.check(&found.state).map_err(|cause| failed(cause, &found));
        let checked = agree::<_, TrainerError>(&group, checked)?;
        restore_held(&*self.learner.engine, &trained_of(&checked.state))?;
        let loaded = self.load(&found, checked, optimizer.as_ref()).map_err(|cause| failed(cause, &found));
        self.saver.resumed_from = found.path.parent().map(Into::into);
        // Rank 0's folder counts: other ranks may know it by another name.
        let own = self.saver.checkpoints.as_ref().zip(self.saver.resumed_from.as_ref());
        let mut is_saved = [u8::from(own.is_some_and(|(own, folder)| own.is_in(folder)))];
        group.broadcast(&mut is_saved, 0)?;
        let is_saved = is_saved[0] > 0;
        self.context.state.saved_at = is_saved.then_some(found.state.step);
        self.context.state.checkpoint = Some(found.path.clone());
        self.context.is_unsaved = !is_saved;
        agree::<_, TrainerError>(&group, loaded)?;
        Ok(true)
    }

    /// Warns on rank 0, and in the run's log.
    fn warn(&self, text: Option<String>) {
        let Some(text) = text.filter(|_| self.context.state.rank() == 0) else { return };
        match &self.saver.checkpoints {
            Some(checkpoints) => checkpoints.warn(&text),
            None => tracing::warn!("{text}"),
        }
    }

    /// The position of a checkpoint, on this run's data.
    fn position_of(&self, saved: &RunState) -> Result<SamplerPosition, Cause> {
        let from: SamplerPosition = serde_json::from_value(saved.sampler.clone())?;
        from.check_seed(self.data.sampler().seed())?;
        match self.data.id().map_or(Ok(()), |now| from.check_data(now)) {
            Err(error) if self.context.settings.accept_new_data => {
                self.warn(Some(format!("{error}; it was accepted, and the epoch continues at its position")))
            }
            checked => checked?,
        }
        let all = self.data.sampler().num_positions(from.epoch);
        Ok(SamplerPosition { samples_seen: from.samples_seen.min(all), data: self.data.id(), ..from })
    }

    /// What can be checked before anything is changed.
    fn check(&self, saved: &RunState) -> Result<Checked, Cause> {
        Ok(Checked {
            from: self.position_of(saved)?,
            section: SavedTrainer::of(saved)?,
            scale: SavedScale::of(&saved.scaler)?,
            state: held_parts(self.learner, saved)?,
        })
    }

    /// Loads everything but the weights.
    fn load(
        &mut self,
        found: &Loaded,
        checked: Checked,
        optimizer: Option<&UnreadOptimizer>,
    ) -> Result<(), Cause> {
        let Checked { state: saved, from, section, scale } = checked;
        if !saved.trained.is_empty() {
            self.context.hooks.load_evaluation_weights(&saved.model)?;
        }
        match optimizer {
            Some(unread) => self.load_optimizer_in_parts(unread)?,
            None => self.context.state.optimizer.load_state(&saved.optimizer)?,
        }
        self.learner.engine.settle_state(&*self.context.state.optimizer)?;
        let state = &mut self.context.state;
        scale.load_into(self.learner.scaler.as_mut())?;
        state.skipped = scale.skipped;
        self.context.hooks.load_state(&section.callbacks)?;
        self.load_schedule(&section)?;
        saved.rng.restore()?;
        self.data.begin_at(from);
        let state = &mut self.context.state;
        state.step_in_epoch = self.data.steps_before(from);
        state.epoch = saved.epoch;
        state.step = saved.step;
        state.resumed_at = Some(saved.step);
        self.saver.evaluated_at = section.evaluated_at;
        let key = self.saver.best.key.to_string();
        if let Some(other) = section.best_by.filter(|other| *other != key) {
            if state.rank() == 0 {
                tracing::warn!(
                    "the best model so far is by `{other}`, and now `{key}` decides; it is not compared"
                );
            }
            return Ok(());
        }
        state.best =
            section.best.map(|best| Best { metric: best.metric.0, step: best.step, epoch: best.epoch });
        self.saver.best.metrics = section.best_metrics.iter().map(|metric| metric.0).collect();
        if self.saver.best.metrics.is_empty() {
            self.saver.best.metrics.extend(state.best.map(|best| best.metric));
        }
        if let Some(left) = &found.best_left {
            self.saver.best.reset_to(self.context, left);
        }
        Ok(())
    }

    /// Loads the state of parameters that is in memory together, and moves it to where it is kept, before the next.
    fn load_optimizer_in_parts(&mut self, unread: &UnreadOptimizer) -> Result<(), Cause> {
        let (layout, engine) = (self.learner.layout()?, &self.learner.engine);
        let optimizer = &mut self.context.state.optimizer;
        let groups: Vec<HashSet<String>> =
            engine.state_groups().into_iter().map(HashSet::from_iter).collect();
        // Parameters that are not trained here are an error, before anything is loaded.
        let is_known = |name: &str| groups.iter().any(|names| names.contains(name));
        optimizer.load_state_of(&unread.read(layout.as_ref(), |name| !is_known(name))?, &|_| false)?;
        for names in &groups {
            let is_wanted = |name: &str| names.contains(name);
            optimizer.load_state_of(&unread.read(layout.as_ref(), is_wanted)?, &is_wanted)?;
            engine.settle_state(&**optimizer)?;
        }
        Ok(())
    }

    fn load_schedule(&mut self, section: &SavedTrainer) -> Result<(), Cause> {
        let Some(schedule) = &mut self.learner.schedule else { return Ok(()) };
        let of_callback = section.callbacks.get(PLATEAU_CALLBACK);
        let state = if section.schedule.is_null() { of_callback } else { Some(&section.schedule) };
        match state {
            Some(state) => Ok(schedule.load_state(state, self.context.state.lr())?),
            None => Ok(()),
        }
    }
}

/// Requests an evaluation that was due after a checkpoint's last step. The evaluation at the end of an epoch is made
/// when the epoch is ended again.
pub(super) fn ask_for_missing_evaluation(saver: &Saver, context: &mut Context<'_>) {
    let every = context.settings.validate_every;
    let state = &mut context.state;
    let is_last = state.is_enough() && state.step_in_epoch > 0 && every != Every::Never;
    let is_due = every.is_at_step(state.step) || is_last;
    state.requests.validation = is_due && saver.evaluated_at != Some(state.step);
}

/// Loads the weights of the best model into the model.
pub(super) fn load_best<M: Model<B> + ?Sized, B: Batch>(
    saver: &mut Saver,
    learner: &Learner<'_, M, B>,
    context: &Context<'_>,
) -> Result<(), TrainerError> {
    if let Some(weights) = saver.best.take_weights() {
        return restore_held(&*learner.engine, &weights);
    }
    let Some(best) = context.state.best else { return Ok(()) };
    // The best model may be older than the checkpoint that was resumed, and then be in its folder.
    let others = saver.resumed_from.as_ref().map(|folder| saver.checkpoints_in(folder));
    for checkpoints in saver.checkpoints.clone().into_iter().chain(others) {
        let group = &context.state.group;
        let found = if learner.is_divided() {
            checkpoints.find_best(group)?
        } else {
            checkpoints.load_best(group)?
        };
        if let Some(mut found) = found.filter(|found| found.state.step == best.step) {
            found.set_optimizer(Default::default());
            let read = read_parts(learner, &mut found, group).map_err(LocalFailure::from);
            agree::<_, TrainerError>(group, read)?;
            let held = held_parts(learner, &found.state).map_err(LocalFailure::from);
            let held = agree::<_, TrainerError>(&context.state.group, held)?;
            return restore_held(&*learner.engine, &held.model);
        }
    }
    Err(SharedFailure::on_all_ranks(format!(
        "the best model, of step {}, is in none of the folders that this training knows; the last weights stay; \
         try the save_path of the training that it resumes",
        best.step
    ))
    .into())
}

/// Reads what this rank holds of a checkpoint, if its tensors have not been read.
fn read_parts<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    found: &mut Loaded,
    group: &ProcessGroup,
) -> Result<(), CheckpointError> {
    found.read_parts(learner.layout()?.as_ref(), group)
}

/// What this rank holds of a checkpoint, whose model must be that of the training.
fn held_parts<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    saved: &RunState,
) -> Result<RunState, CheckpointError> {
    let state = match learner.layout()? {
        Some(layout) => layout.part_of(saved)?,
        None => saved.clone(),
    };
    check_model(&held_by(&*learner.engine), &state.model)?;
    Ok(state)
}
