//! Steps on a GPU as CUDA graphs: one of forward, loss, backward and reduction, one of the optimizer. Callbacks have their say in between, as
//! in any step.
//!
//! ```text
//!   eager       the first steps of a key, and steps of other shapes; also after parameters were frozen or thawed, until that is recorded
//!   graphs      batch copied in ─▶ ┃forward ─ loss ─ backward ─ clipping┃ ─▶ loss and norm read ─▶ on_backward_end ─▶ ┃optimizer┃ ─▶ on_step_end
//!   … in fp16                      ┃ … ─ backward ─ gradients unscaled ─ scale moved on ─ clipping┃ ─▶ … overflow and scale read ─▶ … unless overflown
//! ```
//! The whole training runs on one stream, on which what is recorded is launched as well. Where something cannot be recorded, the reason is
//! logged once, and steps stay eager.
//!
//! Ranks that reduce rehearse first, each for itself and without a call to the others: one that failed among the recordings of the others would leave them
//! waiting. Only if all can do it, they record together. Not here: which way a step goes (`way`), batches copied beside a step (`upload`).

mod recorded;

use drumline_torch::cuda::{Graph, Pool, Priority, Stream, StreamScope, pinned_like, synchronize};
use drumline_torch::{Beside, TensorCollectives, TorchError, clip_grad_norm_on_device, grad};
use tch::{Device, Kind, Tensor, no_grad};

use super::batch::Batch;
use super::callbacks::GradientClip;
use super::error::TrainerError;
use super::hooks::Hook;
use super::meeting::Agreed;
use super::model::{Mode, Model};
use super::run::Run;
use super::step::Computed;
use super::supply::{Supply, Window};
use super::way::{Key, Parameter, Seen, Shapes, Wish, shapes};
use crate::loader::Cause;
use crate::quiet::guarded_quietly;
use crate::shared_failure::{SharedFailure, Trouble, guarded, in_words};
use recorded::Made;
pub(super) use recorded::Recorded;

/// What has been recorded, or is to be.
pub(super) struct Graphs<B, O> {
    pool: Pool,
    seen: Seen,
    /// All parameters of the model, also those that are frozen now.
    parameters: Vec<Tensor>,
    gradients: Option<Recorded<B, O>>,
    optimizer: Optimizing,
    is_clipping_told: bool,
}

enum Optimizing {
    /// It can be recorded, and has not been.
    Unrecorded,
    Recorded(Graph),
    /// It cannot.
    Eager,
}

impl Optimizing {
    fn forget(&mut self) {
        if let Self::Recorded(_) = self {
            *self = Self::Unrecorded;
        }
    }
}

impl<B, O> Graphs<B, O> {
    pub(super) fn new(parameters: Vec<Tensor>) -> Result<Self, TorchError> {
        let (seen, optimizer) = (Seen::default(), Optimizing::Unrecorded);
        Ok(Self { pool: Pool::new()?, seen, parameters, gradients: None, optimizer, is_clipping_told: false })
    }

    /// What a step of these batches depends on.
    fn key(&self, shapes: Shapes, clips: impl Iterator<Item = GradientClip>) -> Key {
        Key {
            shapes,
            parameters: self.parameters.iter().map(Parameter::of).collect(),
            clips: clips.collect(),
        }
    }

    /// Drops what was recorded, when nothing of it runs any more. Memory that graphs have used is not used for another recording.
    fn forget(&mut self, device: Device) -> Result<(), TorchError> {
        if let Device::Cuda(gpu) = device {
            synchronize(gpu)?;
        }
        self.gradients = None;
        self.optimizer.forget();
        self.pool = Pool::new()?;
        Ok(())
    }
}

/// The stream of a training on a GPU, current until this is dropped. It comes after what the caller's stream has to do, and what that does next comes after it.
pub(super) struct OwnStream {
    own: Stream,
    outside: Stream,
    scope: Option<StreamScope>,
}

impl OwnStream {
    pub(super) fn enter(device: Device) -> Result<Option<Self>, TorchError> {
        let Device::Cuda(index) = device else { return Ok(None) };
        let (own, outside) = (Stream::new(index, Priority::Normal)?, Stream::current(index)?);
        own.wait_for_stream(outside)?;
        Ok(Some(Self { own, outside, scope: Some(own.enter()?) }))
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        drop(self.scope.take());
        // A GPU that fails here fails whoever uses it next, and that one can tell.
        let _ = self.outside.wait_for_stream(self.own);
    }
}

impl<M: Model<B> + ?Sized, B: Batch> Run<'_, M, B> {
    /// Whether this rank can make a step of these batches by graphs. Asked once a step.
    pub(super) fn can_use_graphs(&mut self, batches: &[B]) -> bool {
        let Some(graphs) = self.graphs.as_mut().filter(|_| !self.tracer.is_on()) else { return false };
        let key = shapes(batches).map(|shapes| graphs.key(shapes, self.hooks.gradient_clips()));
        let recorded = graphs.gradients.as_ref().map(|recorded| &recorded.key);
        let is_recorded = recorded.is_some();
        let why = match graphs.seen.wish(key, recorded) {
            Wish::Eager => return false,
            Wish::Graphs if is_recorded => return true,
            Wish::Graphs => self.is_recordable(),
            Wish::OtherClips => {
                self.warn_of_clips();
                return false;
            }
            Wish::Forget => match self.forget_graphs() {
                Ok(()) => return false,
                Err(error) => Err(error.to_string()),
            },
            Wish::Never(why) => Err(why.to_owned()),
        };
        if let Err(why) = &why {
            self.give_up(why);
        }
        why.is_ok()
    }

    /// Whether a step by graphs would have to be recorded.
    pub(super) fn has_to_record(&self) -> bool {
        self.graphs.as_ref().is_some_and(|graphs| graphs.gradients.is_none())
    }

    /// Parameters were frozen, thawed or replaced, here or on another rank.
    fn forget_graphs(&mut self) -> Result<(), TorchError> {
        // The optimizer may have to make what it keeps of a thawed parameter, in a step that is not recorded.
        self.has_stepped = false;
        tracing::info!(
            rank = self.state.rank(),
            step = self.state.step,
            "CUDA graphs are recorded again: what is trained has changed"
        );
        self.graphs.as_mut().map_or(Ok(()), |graphs| graphs.forget(self.state.device))
    }

    /// Once, by rank 0.
    fn warn_of_clips(&mut self) {
        let Some(graphs) = &mut self.graphs else { return };
        if !std::mem::replace(&mut graphs.is_clipping_told, true) && self.state.rank() == 0 {
            tracing::warn!(
                "steps are not made as CUDA graphs while gradients are clipped by other bounds than in the recorded step"
            );
        }
    }

    /// Whether what ranks do together in a step can be recorded; if not, why.
    fn is_recordable(&self) -> Result<(), String> {
        if !self.ddp.is_reducing() {
            return Ok(());
        }
        self.ddp.is_recordable()?;
        match self.scaler.is_some() && self.state.group.size() > 1 {
            true => self.state.group.is_recordable(),
            false => Ok(()),
        }
    }

    /// The reason is told once, by rank 0.
    fn give_up(&mut self, why: &str) {
        self.graphs = None;
        let why = first_line(why);
        match self.state.rank() {
            0 => tracing::warn!("steps are not made as CUDA graphs: {why}"),
            rank => tracing::debug!(rank, "steps are not made as CUDA graphs: {why}"),
        }
    }

    /// What [`gradients`](Self::gradients) computes, by a graph. The next step's batches are taken while it runs.
    pub(super) fn graphed_gradients(
        &mut self,
        window: Window<B>,
        agreed: &Agreed,
        supply: &mut Supply<B>,
    ) -> Result<Computed, TrainerError> {
        let factor = self.state.group.size() as f64 / agreed.count;
        if agreed.records && !self.has_to_record() {
            self.forget_graphs()?;
        }
        let Some(mut graphs) = self.graphs.take() else { return self.gradients(window.batches, agreed) };
        let mut recorded = match graphs.gradients.take() {
            Some(recorded) => {
                recorded.take_in(&window, factor)?;
                recorded
            }
            None => {
                let device = self.state.device;
                let key =
                    graphs.key(shapes(&window.batches).unwrap_or_default(), self.hooks.gradient_clips());
                let batches = window.batches.into_iter().map(|batch| copied_to(batch, device));
                let batches = batches.collect::<Result<Vec<B>, _>>()?;
                match self.record(graphs.pool, &batches, agreed)? {
                    Some(made) => Recorded::new(made, batches, key),
                    None => return self.gradients(batches, agreed),
                }
            }
        };
        for _ in &recorded.batches {
            for hook in [Hook::BatchBegin, Hook::LossBegin, Hook::BackwardBegin] {
                self.hooks.call(hook, &mut self.state);
            }
        }
        if graphs.key(Vec::new(), std::iter::empty()).parameters != recorded.key.parameters {
            return Err(self.changed_too_late());
        }
        recorded.attach(&self.state.parameters)?;
        recorded.launch(self.state.step + 1)?;
        // Before anything waits for the GPU.
        self.take_ahead(supply, &mut recorded);
        self.score(&recorded);
        let computed = recorded.made.read()?;
        graphs.gradients = Some(recorded);
        self.graphs = Some(graphs);
        Ok(computed)
    }

    /// The other ranks are on their way into their graphs.
    fn changed_too_late(&self) -> TrainerError {
        TrainerError::Unfit(format!(
            "rank {}: a callback has frozen, thawed or replaced parameters within step {}, whose CUDA graph was about to be launched; \
             try on_step_end or on_epoch_begin for it, or .cuda_graphs(false)",
            self.state.rank(),
            self.state.step + 1
        ))
    }

    fn score(&mut self, recorded: &Recorded<B, M::Output>) {
        let scored = guarded(|| {
            let mut outputs = recorded.made.outputs.iter().zip(&recorded.batches);
            no_grad(|| outputs.try_for_each(|(output, batch)| self.train_scores.update(output, batch)))
        });
        if let Err(trouble) = scored {
            self.hooks.note(trouble);
        }
    }

    /// Records forward, loss and backward of these batches. Nothing of it runs. `None` if one of the ranks cannot: then graphs are given up on all of them, and
    /// the step can be made as it is.
    fn record(
        &mut self,
        pool: Pool,
        batches: &[B],
        agreed: &Agreed,
    ) -> Result<Option<Made<M::Output>>, TrainerError> {
        let factor = self.state.group.size() as f64 / agreed.count;
        let factor = Tensor::f_full([0i64; 0], factor, (Kind::Double, self.state.device))?;
        if !self.ddp.is_reducing() {
            return match guarded_quietly(|| Ok(self.record_whole(pool, batches, factor)?)) {
                Ok(made) => Ok(Some(made)),
                Err(trouble) => self.leave(&trouble.text, agreed),
            };
        }
        let rehearsed = self.rehearse(pool, batches, &factor);
        let told = self.state.group.all_gather_object(&rehearsed.as_ref().err().cloned())?;
        if let Some(failure) = SharedFailure::of(&told) {
            return self.leave(&failure.to_string(), agreed);
        }
        self.begin_again(agreed)?;
        let made = self.record_whole(pool, batches, factor);
        // It has lived until now so that its memory is used again.
        drop(rehearsed);
        made.map(Some).map_err(|error| self.unrecorded(error))
    }

    /// Records what this rank does by itself, to see whether that can be.
    fn rehearse(&mut self, pool: Pool, batches: &[B], factor: &Tensor) -> Result<Graph, Trouble> {
        guarded_quietly(|| {
            self.state.optimizer.zero_grad()?;
            let alone = || self.norms.alone(|| self.ddp.no_sync(|| self.compute(batches, factor)));
            let (graph, _) = Graph::record(pool, alone)?;
            Ok(graph)
        })
    }

    /// The step will be made as it is, as all that follow.
    fn leave(&mut self, why: &str, agreed: &Agreed) -> Result<Option<Made<M::Output>>, TrainerError> {
        self.give_up(why);
        self.begin_again(agreed)?;
        Ok(None)
    }

    /// What was recorded was no step.
    fn begin_again(&mut self, agreed: &Agreed) -> Result<(), TrainerError> {
        self.state.optimizer.zero_grad()?;
        Ok(self.ddp.begin_step(agreed.buffers_of.unwrap_or(0))?)
    }

    /// The others are in the midst of their recordings, and cannot go back.
    fn unrecorded(&self, error: TrainerError) -> TrainerError {
        match error {
            TrainerError::Comm(_) => error,
            other => TrainerError::Unfit(format!(
                "rank {} cannot record step {} as a CUDA graph with the others: {}; try .cuda_graphs(false)",
                self.state.rank(),
                self.state.step + 1,
                first_line(&in_words(&other))
            )),
        }
    }

    fn record_whole(
        &mut self,
        pool: Pool,
        batches: &[B],
        factor: Tensor,
    ) -> Result<Made<M::Output>, TrainerError> {
        self.state.optimizer.zero_grad()?;
        let (graph, (figures, mut outputs)) = Graph::record(pool, || {
            let (sum, outputs) = self.compute(batches, &factor)?;
            Ok::<_, TrainerError>((self.figures(sum)?, outputs))
        })?;
        if self.train_scores.0.is_empty() {
            outputs.clear();
        }
        let grads: Result<_, _> = self.state.parameters.iter().map(|named| grad(&named.tensor)).collect();
        Ok(Made {
            graph,
            factor,
            read: pinned_like(&figures)?,
            figures,
            is_scaled: self.scaler.is_some(),
            outputs,
            grads: grads?,
        })
    }

    /// The sum of the losses, and the outputs.
    fn compute(&self, batches: &[B], factor: &Tensor) -> Result<(Tensor, Vec<M::Output>), TrainerError> {
        let (mut sums, mut outputs, beside) = (Vec::new(), Vec::new(), self.beside()?);
        for (done, batch) in batches.iter().enumerate() {
            let forward = || self.forward(batch);
            let (output, loss) = match &beside {
                Some(beside) => beside.forward(forward)?,
                None => forward()?,
            };
            let part = loss.f_mul(&factor.f_to_kind(loss.kind())?)?;
            let backward = || match &beside {
                Some(beside) => beside.backward(|| self.backward(&part)),
                None => self.backward(&part),
            };
            if done + 1 < batches.len() {
                self.ddp.no_sync(backward)?
            } else {
                backward()?
            }
            sums.push(loss.detach());
            outputs.push(output);
        }
        Ok((Tensor::f_stack(&sums, 0)?.f_sum(Kind::Double)?, outputs))
    }

    /// The output of a batch and its loss.
    fn forward(&self, batch: &B) -> Result<(M::Output, Tensor), TrainerError> {
        let _autocast = self.autocast().map_err(unfit)?;
        let output = self.ddp.forward_with(|model| model.forward_batch(batch, Mode::Train))?;
        let output = output.map_err(unfit)?;
        let loss = self.loss.sum(&output, batch).map_err(unfit)?;
        Ok((output, loss))
    }

    /// Gradients of small convolutions' weights are computed beside backward, unless others wait for them one by one.
    fn beside(&self) -> Result<Option<Beside>, TorchError> {
        match self.state.device {
            Device::Cuda(index) if !self.ddp.is_reducing() => Beside::new(index).map(Some),
            _ => Ok(None),
        }
    }

    /// What is read of the step. In fp16 gradients become those of the loss itself, and the scale moves on; then they are clipped: all of it on the GPU.
    fn figures(&mut self, sum: Tensor) -> Result<Tensor, TrainerError> {
        let mut figures = vec![sum];
        if let Some(scaler) = &mut self.scaler {
            let mut unscaled = scaler.received().unscale(scaler, self.state.parameters.clone())?;
            unscaled.agree(&self.state.group)?;
            figures.extend(<[Tensor; 2]>::from(unscaled.update(scaler)?));
        }
        let (clips, parameters) = (self.hooks.gradient_clips(), &self.state.parameters);
        let norms = clips.map(|clip| clip.apply(parameters, clip_grad_norm_on_device));
        figures.extend(norms.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().next());
        let figures =
            figures.iter().map(|figure| figure.f_to_kind(Kind::Double)).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_stack(&figures, 0)?)
    }

    /// The optimizer's step, by a graph where that is possible.
    pub(super) fn graphed_optimizer(&mut self) -> Result<(), TrainerError> {
        // Its first step here is another: it makes what is kept. In fp16 all before may have been left out.
        let is_first = !std::mem::replace(&mut self.has_stepped, true);
        let is_changed = std::mem::take(&mut self.state.is_optimizer_changed);
        if let Some(graphs) = self.graphs.as_mut().filter(|_| is_changed) {
            graphs.optimizer.forget();
        }
        // Callbacks may have taken gradients away, or given others.
        let recorded = self.graphs.as_ref().and_then(|graphs| graphs.gradients.as_ref());
        let is_attached =
            recorded.map_or(Ok(false), |recorded| recorded.is_attached(&self.state.parameters))?;
        let is_as_recorded = is_attached && !is_first && !is_changed;
        let Some(graphs) = self.graphs.as_mut().filter(|_| is_as_recorded) else {
            return Ok(self.state.optimizer.step()?);
        };
        self.state.optimizer.take_in_changes()?;
        if let Optimizing::Unrecorded = graphs.optimizer {
            let optimizer = &mut self.state.optimizer;
            let recorded = guarded_quietly(|| {
                optimizer.keep_lr_on_device()?;
                Ok(Graph::record(graphs.pool, || optimizer.step())?)
            });
            graphs.optimizer = match recorded {
                Ok((graph, ())) => Optimizing::Recorded(graph),
                Err(why) => {
                    if self.state.group.rank() == 0 {
                        tracing::warn!(
                            "the optimizer is not made as a CUDA graph: {}",
                            first_line(&why.text)
                        );
                    }
                    Optimizing::Eager
                }
            };
        }
        match &graphs.optimizer {
            Optimizing::Recorded(graph) => Ok(graph.launch()?),
            _ => Ok(self.state.optimizer.step()?),
        }
    }
}

/// A copy on the device that is the graph's own. Tensors that lie there already may be part of a data set, and the batches to come are written over them.
fn copied_to<B: Batch>(batch: B, device: Device) -> Result<B, TorchError> {
    let is_there =
        batch.tensors().is_some_and(|tensors| tensors.iter().any(|tensor| tensor.device() == device));
    let batch = if is_there { batch.to_device(Device::Cpu)? } else { batch };
    batch.to_device(device)
}

/// What a model or a loss has said.
fn unfit(cause: Cause) -> TrainerError {
    TrainerError::Unfit(in_words(cause.as_ref()))
}

/// Without what libtorch adds: where it was thrown, and by whom it was called. In the words of a panic lines end with two characters.
fn first_line(text: &str) -> &str {
    let end = [text.find('\n'), text.find("\\n")].into_iter().flatten().min();
    text[..end.unwrap_or(text.len())].trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line() {
        assert_eq!(first_line("plain"), "plain");
        assert_eq!(first_line("first \nsecond"), "first");
        let panic =
            format!("panicked: {:?}", "not permitted when stream is capturing\nException raised from …\n");
        assert_eq!(first_line(&panic), "panicked: \"not permitted when stream is capturing");
    }
}
