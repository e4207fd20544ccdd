//! Saves checkpoints of a training.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use drumline_torch::{RngState, nccl};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batch::Batch;
use super::best::BestModels;
use super::context::Context;
use super::error::TrainerError;
use super::learner::Learner;
use super::model::Model;
use super::state::Best;
use super::train_data::TrainData;
use super::weights::{trained_beside, with_evaluation_weights};
use crate::checkpoint::{Checkpoints, Loaded, Mark, RunState, Scalar, Score, held_by};
use crate::comm::shared_failure::{LocalFailure, agree, with_causes};
use crate::data::loader::Cause;
use crate::scaling::SavedScale;

/// The trainer's section of a checkpoint: what is saved besides weights, optimizer and position.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SavedTrainer {
    pub(super) best: Option<SavedBest>,
    /// The key by which it is the best.
    #[serde(default)]
    pub(super) best_by: Option<String>,
    /// The step of the last evaluation.
    #[serde(default)]
    pub(super) evaluated_at: Option<u64>,
    /// The metrics of the best checkpoints, the best first.
    #[serde(default, rename = "kept_best")]
    pub(super) best_metrics: Vec<Scalar>,
    #[serde(default)]
    pub(super) callbacks: BTreeMap<String, Value>,
    /// The state of the learning rate schedule.
    #[serde(default)]
    pub(super) schedule: Value,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct SavedBest {
    pub(super) metric: Scalar,
    pub(super) step: u64,
    pub(super) epoch: u64,
}

impl SavedTrainer {
    pub(super) fn of(saved: &RunState) -> Result<Self, serde_json::Error> {
        match &saved.trainer {
            Value::Null => Ok(Self::default()),
            section => Self::deserialize(section),
        }
    }
}

/// Whether a trainer's checkpoint includes the evaluation of its step. One that was saved when a signal interrupted the
/// evaluation does not: a training that resumes from it makes the evaluation, even if no step is left to do.
pub fn was_evaluated(checkpoint: &Loaded) -> bool {
    let saved = &checkpoint.state;
    SavedTrainer::of(saved).is_ok_and(|section| section.evaluated_at == Some(saved.step))
}

/// The checkpoints of a training.
pub(super) struct Saver {
    /// `None` without a folder.
    pub(super) checkpoints: Option<Checkpoints>,
    /// The folder of the checkpoint that was resumed.
    pub(super) resumed_from: Option<PathBuf>,
    /// The step of the last evaluation before the resume.
    pub(super) evaluated_at: Option<u64>,
    pub(super) best: BestModels,
}

impl Saver {
    pub(super) fn new(checkpoints: Option<Checkpoints>, best: BestModels) -> Self {
        Self { checkpoints, resumed_from: None, evaluated_at: None, best }
    }

    /// Sets how many checkpoints are kept, as callbacks have requested.
    pub(super) fn set_num_kept(&mut self, context: &Context<'_>) {
        let requests = &context.state.requests;
        if let Some(num) = requests.keep_last.and_then(NonZeroUsize::new) {
            self.checkpoints = self.checkpoints.take().map(|checkpoints| checkpoints.keep_last(num));
        }
        if let Some(num) = requests.keep_best.and_then(NonZeroUsize::new) {
            self.checkpoints = self.checkpoints.take().map(|checkpoints| checkpoints.keep_best(num));
        }
    }

    /// Saves the state of the training. All ranks call it together. Without a folder it does nothing.
    pub(super) fn save<M: Model<B> + ?Sized, B: Batch>(
        &mut self,
        learner: &Learner<'_, M, B>,
        data: &TrainData<B>,
        context: &mut Context<'_>,
    ) -> Result<(), TrainerError> {
        with_evaluation_weights(context, &*learner.engine, |context| {
            context.state.requests.checkpoint = false;
            let mark = self.best.place.take().map_or(Mark::Latest, Mark::Place);
            let Some(checkpoints) = self.checkpoints.clone() else { return Ok(()) };
            learner.engine.sync_buffers()?;
            let settled = nccl::settle(learner.device()).map_err(Cause::from);
            let state = settled.and_then(|()| self.to_checkpoint(learner, data, context));
            let state = agree::<_, TrainerError>(&context.state.group, state.map_err(LocalFailure::from))?;
            match checkpoints.save(&state, mark, &context.state.group) {
                Ok(saved) => context.state.checkpoint = Some(saved.path),
                Err(error) => {
                    // It is not tried again when the training ends.
                    self.checkpoints = None;
                    return Err(error.into());
                }
            }
            context.state.saved_at = Some(context.state.step);
            context.is_unsaved = false;
            context.clock.restart();
            Ok(())
        })
    }

    /// Saves the state after the last step, unless that was done.
    pub(super) fn save_unless_saved<M: Model<B> + ?Sized, B: Batch>(
        &mut self,
        learner: &Learner<'_, M, B>,
        data: &TrainData<B>,
        context: &mut Context<'_>,
    ) -> Result<(), TrainerError> {
        if context.is_unsaved { self.save(learner, data, context) } else { Ok(()) }
    }

    /// Saves the current state after the training has failed on all ranks. An error is only logged.
    pub(super) fn rescue<M: Model<B> + ?Sized, B: Batch>(
        &mut self,
        learner: &Learner<'_, M, B>,
        data: &TrainData<B>,
        context: &mut Context<'_>,
    ) {
        let state = &context.state;
        // If the loss is not finite, the running means of norms are not either. The checkpoint before is better then.
        if state.step == state.resumed_at.unwrap_or(0) || !state.loss.is_finite() {
            return;
        }
        if let Err(error) = self.save_unless_saved(learner, data, context) {
            tracing::error!("cannot save what was reached: {}", with_causes(&error));
        }
    }

    fn to_checkpoint<M: Model<B> + ?Sized, B: Batch>(
        &self,
        learner: &Learner<'_, M, B>,
        data: &TrainData<B>,
        context: &Context<'_>,
    ) -> Result<RunState, Cause> {
        let state = &context.state;
        Ok(RunState {
            optimizer: state.optimizer.state(),
            epoch: state.epoch,
            step: state.step,
            sampler: serde_json::to_value(data.position())?,
            trainer: serde_json::to_value(self.trainer_section(learner, context))?,
            best: state.best.map(|best| best.metric),
            score: self.score(context),
            // There is no loss before the first step of this run.
            loss: (state.count > 0.0).then_some(state.loss),
            config: serde_json::to_value(&state.config)?,
            rng: RngState::capture()?,
            scaler: SavedScale::new(learner.scaler.as_ref(), state.skipped)?.to_value()?,
            trained: trained_beside(context)?,
            layout: learner.layout()?,
            mesh: Some(*learner.engine.mesh().shape()),
            ..RunState::new(held_by(&*learner.engine))?
        })
    }

    fn trainer_section<M: Model<B> + ?Sized, B: Batch>(
        &self,
        learner: &Learner<'_, M, B>,
        context: &Context<'_>,
    ) -> SavedTrainer {
        let best = |Best { metric, step, epoch }| SavedBest { metric: Scalar(metric), step, epoch };
        let evaluated_at = context.state.evaluation.as_ref().map(|evaluation| evaluation.step);
        SavedTrainer {
            best: context.state.best.map(best),
            best_by: Some(self.best.key.to_string()),
            evaluated_at: evaluated_at.or(self.evaluated_at),
            best_metrics: self.best.metrics.iter().copied().map(Scalar).collect(),
            callbacks: context.hooks.state(),
            schedule: learner.schedule.as_ref().map_or(Value::Null, |schedule| schedule.state()),
        }
    }

    /// The result of the evaluation of this step.
    fn score(&self, context: &Context<'_>) -> Option<Score> {
        let state = &context.state;
        let evaluation = state.evaluation.as_ref().filter(|done| done.step == state.step)?;
        let value = evaluation.metric(self.best.key.name())?;
        Some(Score { value, smaller_is_better: self.best.key.smaller_is_better() })
    }

    /// The run's own checkpoints, if they are in this folder. Those of another run are only read.
    pub(super) fn checkpoints_in(&self, folder: &Path) -> Checkpoints {
        let own = self.checkpoints.clone().filter(|own| own.is_in(folder));
        own.unwrap_or_else(|| Checkpoints::new(folder).read_only())
    }
}
