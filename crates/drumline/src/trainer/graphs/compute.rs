//! What the graph of a step records: forward, loss, backward, and the figures that the host reads.

use drumline_parallel::GradSync;
use drumline_torch::cuda::{Graph, pinned_like};
use drumline_torch::{Beside, Named, TorchError, grad};
use tch::{Device, Kind, Tensor};

use super::super::batch::Batch;
use super::super::context::Context;
use super::super::error::TrainerError;
use super::super::learner::Learner;
use super::super::model::{Mode, Model};
use super::Recording;
use super::recorded::Made;
use crate::data::loader::Cause;

pub(super) fn record_whole<M: Model<B> + ?Sized, B: Batch>(
    learner: &mut Learner<'_, M, B>,
    context: &mut Context<'_>,
    recording: &Recording<'_, B>,
    factor: Tensor,
) -> Result<Made<M::Output>, TrainerError> {
    let state = &mut context.state;
    state.optimizer.zero_grad()?;
    let (graph, (figures, mut outputs)) = Graph::record(recording.pool, || {
        let (sum, outputs) = compute(learner, recording.batches, &factor)?;
        Ok::<_, TrainerError>((figures(learner, &state.parameters, sum)?, outputs))
    })?;
    if learner.scores.0.is_empty() {
        outputs.clear();
    }
    let grads: Result<_, _> = state.parameters.iter().map(|named| grad(&named.tensor)).collect();
    Ok(Made {
        graph,
        factor,
        read: pinned_like(&figures)?,
        figures,
        is_scaled: learner.scaler.is_some(),
        outputs,
        grads: grads?,
    })
}

/// The sum of the losses, and the outputs.
pub(super) fn compute<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    batches: &[B],
    factor: &Tensor,
) -> Result<(Tensor, Vec<M::Output>), TrainerError> {
    let (mut sums, mut outputs, beside) = (Vec::new(), Vec::new(), beside(learner)?);
    let mut seen = 0;
    for (done, batch) in batches.iter().enumerate() {
        let sync = GradSync::of(done, batches.len());
        learner.engine.begin_micro_batch();
        let _masks = learner.enter_masks(seen, batch);
        seen += batch.num_samples();
        let forward = || forward(learner, batch, sync);
        let (output, loss) = match &beside {
            Some(beside) => beside.forward(forward)?,
            None => forward()?,
        };
        let part = loss.f_mul(&factor.f_to_kind(loss.kind())?)?;
        match &beside {
            Some(beside) => beside.backward(|| learner.backward(&part, sync))?,
            None => learner.backward(&part, sync)?,
        }
        sums.push(loss.detach());
        outputs.push(output);
    }
    Ok((Tensor::f_stack(&sums, 0)?.f_sum(Kind::Double)?, outputs))
}

/// The output of a batch and its loss.
fn forward<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    batch: &B,
    sync: GradSync,
) -> Result<(M::Output, Tensor), TrainerError> {
    let _autocast = learner.autocast()?;
    let output = learner.engine.forward_with(sync, || learner.model.forward_batch(batch, Mode::Train))?;
    let output = output.map_err(failed)?;
    let loss = learner.loss.sum(&output, batch).map_err(failed)?;
    Ok((output, loss))
}

/// Computes gradients of the weights of small convolutions on a second stream, unless ranks communicate during
/// backward.
fn beside<M: Model<B> + ?Sized, B: Batch>(learner: &Learner<'_, M, B>) -> Result<Option<Beside>, TorchError> {
    match learner.device() {
        Device::Cuda(index) if !learner.engine.communicates() => Beside::new(index).map(Some),
        _ => Ok(None),
    }
}

/// The values that the host reads after the step. In fp16 gradients are unscaled, and the scale is updated for the next
/// step. Then gradients are clipped. All of it happens on the GPU.
fn figures<M: Model<B> + ?Sized, B: Batch>(
    learner: &mut Learner<'_, M, B>,
    parameters: &[Named],
    sum: Tensor,
) -> Result<Tensor, TrainerError> {
    let mut figures = vec![sum];
    if let Some(scaler) = &mut learner.scaler {
        let unscaled = learner.engine.unscale(scaler, parameters.to_vec())?;
        figures.extend(<[Tensor; 2]>::from(unscaled.update(scaler)?));
    }
    let norms = learner.clips.iter().map(|clip| learner.engine.clip_on_device(*clip, parameters));
    figures.extend(norms.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next());
    let figures =
        figures.iter().map(|figure| figure.f_to_kind(Kind::Double)).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_stack(&figures, 0)?)
}

/// A copy on the device that belongs to the graph, because later batches overwrite it. A tensor that lies there already
/// may be part of a data set.
pub(super) fn copied_to<B: Batch>(batch: B, device: Device) -> Result<B, TorchError> {
    let is_there =
        batch.tensors().is_some_and(|tensors| tensors.iter().any(|tensor| tensor.device() == device));
    let batch = if is_there { batch.to_device(Device::Cpu)? } else { batch };
    batch.to_device(device)
}

/// An error of the model or the loss.
fn failed(cause: Cause) -> TrainerError {
    TrainerError::Model { cause }
}
