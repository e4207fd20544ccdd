//! Evaluation on the whole of `dev_data`: each rank takes its share, and each sample counts once.
//!
//! No rank waits for another within its share; shares need not be equal.

use tch::no_grad;

use super::batch::Batch;
use super::error::TrainerError;
use super::hooks::Hook;
use super::model::{Mode, Model};
use super::run::Run;
use super::settings::LoadBestModel;
use super::state::{Best, Evaluation};
use crate::checkpoint::named;
use crate::loader::{Cause, Dataset};
use crate::shared_failure::{agree, guarded};
use drumline_comm::{ReduceOp, on_behalf_of};
use drumline_torch::{Named, TorchError, nccl};

/// How an evaluation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Validated {
    /// All samples were seen, or there was nothing to do.
    Whole,
    /// A signal asked for the end meanwhile; on all ranks.
    Cut,
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// Evaluates, and keeps the model if it is the best so far. Once a step at most, and not where there is nothing to evaluate on.
    pub(super) fn validate(&mut self) -> Result<Validated, TrainerError> {
        self.state.requests.validation = false;
        let is_done = self.state.evaluation.as_ref().is_some_and(|done| done.step == self.state.step);
        if self.dev.is_none() || is_done {
            return Ok(Validated::Whole);
        }
        let validated = self.with_evaluation_weights(Self::validate_these)?;
        self.clock.restart();
        Ok(validated)
    }

    /// Evaluates the weights that are the model's now.
    fn validate_these(&mut self) -> Result<Validated, TrainerError> {
        self.hooks.call(Hook::ValidBegin, &mut self.state);
        let Some(evaluation) = self.evaluation()? else { return Ok(Validated::Cut) };
        let metric = evaluation.metric(self.key.name()).unwrap_or(f64::NAN);
        if evaluation.is_better {
            let (step, epoch) = (self.state.step, self.state.epoch);
            self.state.best = Some(Best { metric, step, epoch });
        }
        self.is_unsaved = true;
        self.state.evaluation = Some(evaluation.clone());
        self.hooks.call(Hook::ValidEnd(&evaluation), &mut self.state);
        self.keep_if_good(metric);
        Ok(Validated::Whole)
    }

    /// The figures of all ranks together; `None` if a signal asked for the end meanwhile.
    fn evaluation(&mut self) -> Result<Option<Evaluation>, TrainerError> {
        // Running means are each rank's own; those of the rank that trained last are the ones that are saved.
        on_behalf_of(self.site, || self.ddp.sync_buffers())?;
        let share = guarded(|| {
            let share = self.share()?;
            nccl::settle(self.state.device)?;
            Ok(share)
        });
        let share = share.map_err(|trouble| trouble.within("evaluation"));
        let own = agree::<_, TrainerError>(&self.state.group, share)?;
        let mut is_cut = [u8::from(own.is_none())];
        self.state.group.all_reduce(&mut is_cut, ReduceOp::Max)?;
        let Some(loss) = own.filter(|_| is_cut[0] == 0) else { return Ok(None) };
        let metrics = self.scores.reduce(loss, &self.state.group)?;
        let mut evaluation = Evaluation {
            epoch: self.state.epoch,
            step: self.state.step,
            samples: self.dev.as_ref().map_or(0, |dev| dev.dataset().len() as u64),
            metrics,
            metric_key: self.key.name().to_owned(),
            is_better: false,
        };
        let value = evaluation.metric(self.key.name()).unwrap_or(f64::NAN);
        evaluation.is_better = self.key.is_better(value, self.state.best.map(|best| best.metric));
        Ok(Some(evaluation))
    }

    /// This rank's sum and count of losses, with the metrics updated; `None` if a signal asked for the end.
    fn share(&mut self) -> Result<Option<[f64; 2]>, Cause> {
        self.scores.reset();
        let mut loss = [0.0; 2];
        let Some(dev) = &self.dev else { return Ok(None) };
        self.state.valid_batches = (0, dev.num_batches() as u64);
        for batch in dev.epoch(0) {
            if self.stop.is_requested() {
                return Ok(None);
            }
            let batch = batch?.to_device(self.state.device)?;
            let (output, sum) = no_grad(|| {
                let _autocast = self.autocast()?;
                let output = self.ddp.module().forward_batch(&batch, Mode::Eval)?;
                let sum = self.loss.sum(&output, &batch)?;
                Ok::<_, Cause>((output, sum.f_double_value(&[]).map_err(TorchError::from)?))
            })?;
            loss[0] += sum;
            loss[1] += self.loss.count(&batch)?;
            no_grad(|| self.scores.update(&output, &batch))?;
            self.state.valid_batches.0 += 1;
            self.hooks.call(Hook::ValidBatchEnd, &mut self.state);
        }
        Ok(Some(loss))
    }

    /// In a checkpoint, which is saved when all that belongs to this moment is done; where there is no folder, in memory.
    fn keep_if_good(&mut self, metric: f64) {
        let is_better = self.state.evaluation.as_ref().is_some_and(|evaluation| evaluation.is_better);
        if self.checkpoints.is_some() {
            let keep = self.state.requests.keep_best.unwrap_or(1);
            self.place_among_best = self.key.rank(metric, &mut self.kept_best, keep);
            self.state.requests.checkpoint |= self.place_among_best.is_some();
        } else if is_better && self.load_best_model == LoadBestModel::Yes {
            let copy = |Named { name, tensor }: Named| Named { name, tensor: tensor.detach().copy() };
            self.best_weights = Some(named(self.store).into_iter().map(copy).collect());
        }
    }
}
