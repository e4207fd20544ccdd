//! Evaluation on all of `dev_data`: each rank takes its share, and each sample counts once.
//!
//! Shares need not be equal. Ranks do not wait for each other within them, unless they gather parameters together, or have
//! parts of one model or of the same texts: such ranks end together (`engine::ending`).

use std::rc::Rc;

use drumline_comm::{ReduceOp, on_behalf_of};
use drumline_parallel::{Cut, Forwards, ParallelError};
use drumline_torch::{TorchError, nccl};
use tch::no_grad;

use super::batch::Batch;
use super::best::BestModels;
use super::context::Context;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::hooks::Hook;
use super::learner::Learner;
use super::metric::{LOSS, Scores};
use super::model::{Mode, Model};
use super::pipelined::PipelinedShare;
use super::state::{Best, Evaluation};
use super::weights::with_evaluation_weights;
use crate::comm::shared_failure::{LocalFailure, agree, guarded};
use crate::data::loader::{Cause, Dataset, Loader};
use crate::schedule::Evaluated;

/// How an evaluation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Validated {
    /// All samples were evaluated, or there was nothing to do.
    Complete,
    /// A signal asked for the end meanwhile. All ranks have stopped.
    Interrupted,
}

pub(super) struct Evaluator<'a, B: Batch, O> {
    pub(super) dev: Option<Loader<AnyDataset<B>>>,
    pub(super) scores: Scores<'a, B, O>,
}

impl<B: Batch, O> Evaluator<'_, B, O> {
    /// Evaluates, and keeps the model if it is the best so far. It evaluates at most once per step, and only if there
    /// is data.
    pub(super) fn validate<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        best: &mut BestModels,
        context: &mut Context<'_>,
    ) -> Result<Validated, TrainerError> {
        context.state.requests.validation = false;
        let is_done = context.state.evaluation.as_ref().is_some_and(|done| done.step == context.state.step);
        if self.dev.is_none() || is_done {
            return Ok(Validated::Complete);
        }
        let engine = Rc::clone(&learner.engine);
        let validated = with_evaluation_weights(context, &*engine, |context| {
            context.call(Hook::ValidBegin);
            let Some(evaluation) = self.evaluate(learner, best, context)? else {
                return Ok(Validated::Interrupted);
            };
            note(learner, best, context, &evaluation);
            Ok(Validated::Complete)
        })?;
        context.clock.restart();
        Ok(validated)
    }

    /// The metrics of all ranks together; `None` if a signal asked for the end meanwhile.
    pub(super) fn evaluate<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &Learner<'_, M, B>,
        best: &BestModels,
        context: &mut Context<'_>,
    ) -> Result<Option<Evaluation>, TrainerError> {
        // Each rank has its own running means. Those of the rank that trained last are evaluated and saved.
        let forwards = match &self.dev {
            Some(dev) if !self.scores.use_model() => Forwards::Counted(dev.num_batches()),
            _ => Forwards::Any,
        };
        on_behalf_of(context.site, || learner.engine.begin_evaluation(forwards))?;
        let share = guarded(|| {
            let share = self.share(learner, context)?;
            nccl::settle(learner.device())?;
            Ok(share)
        });
        let share = share.map_err(|failure| failure.within("evaluation"));
        let failure = share.as_ref().err().map(|failure| failure.text.as_str());
        let ended = on_behalf_of(context.site, || learner.engine.end_evaluation(failure));
        // A failure of a rank that waited for another one is less of a cause.
        let share = share.and_then(|share| ended.map(|()| share).map_err(LocalFailure::from));
        let own = agree::<_, TrainerError>(&context.state.group, share)?;
        let mut is_cut = [u8::from(own.is_none())];
        context.state.group.all_reduce(&mut is_cut, ReduceOp::Max)?;
        let Some(loss) = own.filter(|_| is_cut[0] == 0) else { return Ok(None) };
        let metrics = self.scores.reduce(loss, learner.scored_by())?;
        let mut evaluation = Evaluation {
            epoch: context.state.epoch,
            step: context.state.step,
            samples: self.dev.as_ref().map_or(0, |dev| dev.dataset().len() as u64),
            metrics,
            metric_key: best.key.name().to_owned(),
            is_better: false,
        };
        let value = evaluation.metric(best.key.name()).unwrap_or(f64::NAN);
        evaluation.is_better = best.key.is_better(value, context.state.best.map(|best| best.metric));
        Ok(Some(evaluation))
    }

    /// This rank's sum and count of losses, with the metrics updated; `None` if a signal asked for the end.
    fn share<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &Learner<'_, M, B>,
        context: &mut Context<'_>,
    ) -> Result<Option<[f64; 2]>, Cause> {
        self.scores.reset();
        let mut loss = [0.0; 2];
        let Some(dev) = &self.dev else { return Ok(None) };
        context.state.valid_batches = (0, dev.num_batches() as u64);
        if let Some(pipeline) = &learner.pipeline {
            let share = PipelinedShare { pipeline, scores: &mut self.scores, batches: dev.epoch(0) };
            return share
                .run(learner, context)
                .inspect_err(|cause| pipeline.end_messages(&cause.to_string()));
        }
        for batch in dev.epoch(0) {
            if context.stop.is_requested() && learner.engine.cut_evaluation() == Cut::Now {
                return Ok(None);
            }
            let batch = batch?.to_device(learner.device())?;
            let evaluated = no_grad(|| {
                let _autocast = learner.autocast()?;
                let forward = || learner.model.forward_batch(&batch, Mode::Eval);
                let output = match learner.engine.evaluate_with(forward) {
                    Err(ParallelError::EvaluationCut) => return Ok(None),
                    output => output??,
                };
                let sum = learner.loss.sum(&output, &batch)?;
                Ok::<_, Cause>(Some((output, sum.f_double_value(&[]).map_err(TorchError::from)?)))
            });
            let Some((output, sum)) = evaluated? else { return Ok(None) };
            loss[0] += sum;
            loss[1] += learner.loss.count(&batch)?;
            no_grad(|| self.scores.update(&output, &batch))?;
            context.state.valid_batches.0 += 1;
            context.call(Hook::ValidBatchEnd);
        }
        Ok(Some(loss))
    }
}

/// Stores the evaluation as the last one of the training.
fn note<M: Model<B> + ?Sized, B: Batch>(
    learner: &mut Learner<'_, M, B>,
    best: &mut BestModels,
    context: &mut Context<'_>,
    evaluation: &Evaluation,
) {
    let metric = evaluation.metric(best.key.name()).unwrap_or(f64::NAN);
    let state = &mut context.state;
    if evaluation.is_better {
        state.best = Some(Best { metric, step: state.step, epoch: state.epoch });
    }
    context.is_unsaved = true;
    if let Some(schedule) = &mut learner.schedule {
        let loss = evaluation.metric(LOSS).unwrap_or(f64::NAN);
        let evaluated = Evaluated { loss, step: evaluation.step, base_lr: state.initial_lr };
        if let Some(lr) = schedule.evaluated(evaluated) {
            state.set_lr(lr);
        }
    }
    state.evaluation = Some(evaluation.clone());
    context.call(Hook::ValidEnd(evaluation));
    best.keep_if_good(context, &*learner.engine, metric);
}
