//! Steps and evaluations of a model that is cut into stages: batches are the micro-batches of a pipeline.
//!
//! ```text
//!   batches of a step ─ Staged::inputs ─▶ first stage ─▶ … ─▶ last stage ─ Staged::output ─▶ loss, metrics
//! ```
//! All ranks of a pipeline have the same batches; only the last stage has losses and metrics. Of ranks along `tp`, which
//! have the same ones, the first counts; the others measure as well, as metrics may communicate along `tp`. `on_loss_begin` and
//! `on_backward_begin` are not called, as forwards and backwards of a step overlap. Not here: in which order (`Pipeline`).

use drumline_comm::on_behalf_of;
use drumline_parallel::pipeline::{LayerError, MicroBatch, Pipeline, Scale};
use drumline_parallel::{Agreed, Cut, ParallelError};
use drumline_torch::nccl;
use tch::{Tensor, no_grad};

use super::batch::Batch;
use super::context::Context;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::hooks::Hook;
use super::learner::{Computed, Learner};
use super::metric::Scores;
use super::model::{Model, Staged};
use super::pipeline_trace::PipelineTrace;
use crate::comm::shared_failure::guarded;
use crate::data::loader::{Cause, Epoch};

const NOT_STAGED: &str = "a pipeline runs a model that has no stages";

/// Batches on the model's device, with what the first layer gets of each.
struct Window<B> {
    batches: Vec<B>,
    micro_batches: Vec<MicroBatch>,
}

impl<M: Model<B> + ?Sized, B: Batch> Learner<'_, M, B> {
    /// The gradients of the mean loss over all samples of all ranks.
    pub(super) fn pipelined(
        &mut self,
        pipeline: &Pipeline,
        context: &mut Context<'_>,
        batches: Vec<B>,
        agreed: &Agreed,
    ) -> Result<Computed, TrainerError> {
        batches.iter().for_each(|_| context.call(Hook::BatchBegin));
        let step = context.state.step + 1;
        let Window { batches, micro_batches } = guarded(|| self.window_of(batches)).map_err(|failure| {
            pipeline.abort(&failure.text);
            TrainerError::Forward { step, cause: failure.text }
        })?;
        let (site, counts) = (self.site, self.has_scores());
        self.waits.over(|| on_behalf_of(site, || pipeline.begin(agreed, &micro_batches)))?;
        let staged = staged_of(self.model)?;
        let scale = self.scaler.as_ref().map_or(Scale::No, Scale::By);
        let (device, precision) = (self.device, self.precision);
        let (of_batch, scores) = (&self.loss, &mut self.scores);
        let mut loss = |outputs: &[Tensor], index: usize| -> Result<Tensor, LayerError> {
            let (batch, _autocast) = (&batches[index], precision.enter_autocast(device)?);
            let output = staged.output(outputs, batch)?;
            no_grad(|| scores.update(&output, batch))?;
            if !counts {
                scores.reset();
            }
            of_batch.sum(&output, batch)
        };
        let made = on_behalf_of(site, || pipeline.gradients(agreed, &micro_batches, scale, &mut loss));
        let sum = made?;
        nccl::settle(device)?;
        // The engine has added the time in which it waited for the reduction.
        self.waits.add(pipeline.waits().iter().map(|(_, begin, end)| end.duration_since(*begin)).sum());
        if context.tracer.is_recording() {
            let plan = pipeline.plan(micro_batches.len())?;
            PipelineTrace::new(pipeline, plan.program(), step).record(&context.tracer);
        }
        Ok(Computed { sum, by_graph: None })
    }

    fn window_of(&self, batches: Vec<B>) -> Result<Window<B>, Cause> {
        let staged = staged_of(self.model)?;
        let mut seen = 0;
        let mut window = Window { batches: Vec::new(), micro_batches: Vec::new() };
        let (is_first, is_last) = (staged.stages().has_first_stage(), staged.stages().has_last_stage());
        for batch in batches {
            // Where a batch is not used, it stays where it is.
            let batch = if is_first || is_last { batch.to_device(self.device)? } else { batch };
            let inputs = if is_first { staged.inputs(&batch)? } else { Vec::new() };
            let count = batch.num_samples();
            let samples = self.step_samples(seen, count);
            window.micro_batches.push(MicroBatch { inputs, targets: Vec::new(), samples });
            window.batches.push(batch);
            seen += count;
        }
        Ok(window)
    }
}

fn staged_of<M: Model<B> + ?Sized, B>(
    model: &M,
) -> Result<&dyn Staged<B, Output = M::Output>, ParallelError> {
    model.staged().ok_or(ParallelError::Internal { what: NOT_STAGED })
}

/// This rank's share of an evaluation.
pub(super) struct PipelinedShare<'e, 'a, B: Batch, O> {
    pub(super) pipeline: &'e Pipeline,
    pub(super) scores: &'e mut Scores<'a, B, O>,
    pub(super) batches: Epoch<AnyDataset<B>>,
}

impl<B: Batch, O> PipelinedShare<'_, '_, B, O> {
    /// The sum and count of losses that count on this rank, with the metrics updated; `None` if a rank asked for the end. As
    /// many batches as a step has are on their way together.
    pub(super) fn run<M: Model<B, Output = O> + ?Sized>(
        mut self,
        learner: &Learner<'_, M, B>,
        context: &mut Context<'_>,
    ) -> Result<Option<[f64; 2]>, Cause> {
        let (staged, counts) = (staged_of(learner.model)?, learner.has_scores());
        let mut total = [0.0; 2];
        loop {
            let taken = self.batches.by_ref().take(staged.stages().micro_batches());
            let taken = taken.collect::<Result<Vec<_>, _>>()?;
            if taken.is_empty() {
                return Ok(Some(total));
            }
            let Window { batches, micro_batches } = learner.window_of(taken)?;
            if context.stop.is_requested() && learner.engine.cut_evaluation() == Cut::Now {
                return Ok(None);
            }
            let mut loss = |outputs: &[Tensor], index: usize| -> Result<Tensor, LayerError> {
                let (batch, _autocast) = (&batches[index], learner.autocast()?);
                let output = staged.output(outputs, batch)?;
                self.scores.update(&output, batch)?;
                if !counts {
                    self.scores.reset();
                }
                learner.loss.sum(&output, batch)
            };
            let forwards = || self.pipeline.forwards(&micro_batches, &mut loss);
            match on_behalf_of(context.site, forwards) {
                Err(ParallelError::EvaluationCut) => return Ok(None),
                sum => total[0] += sum?,
            }
            for batch in &batches {
                if counts {
                    total[1] += learner.loss.count(batch)?;
                }
                context.state.valid_batches.0 += 1;
                context.call(Hook::ValidBatchEnd);
            }
        }
    }
}
