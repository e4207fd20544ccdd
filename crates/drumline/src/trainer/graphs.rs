//! Steps on a GPU as CUDA graphs: one graph of forward, loss, backward and reduction, one of the optimizer. Callbacks
//! run between the two, as in any step.
//!
//! ```text
//!   eager   the first steps of a key, and steps of other shapes; also after parameters were frozen or unfrozen
//!   graph   batch copied in ─▶ ┃forward ─ loss ─ backward ─ clip┃ ─▶ loss, norm read ─▶ on_backward_end ─▶ ┃optimizer┃
//!   fp16    …                  ┃… ─ backward ─ unscale ─ clip┃    ─▶ … overflow, scale read ─▶ … unless overflowed
//! ```
//! The whole training runs on one stream, on which graphs are launched as well. Where something cannot be recorded, the
//! reason is logged once, and steps stay eager.
//!
//! Ranks that communicate make a trial recording first, each by itself and without communication: a rank that failed
//! while the others record would leave them waiting. Only if all succeed, they record together. Not here: which mode a
//! step has (`step_mode`), batches copied during a step (`upload`).

mod compute;
mod own_stream;
mod recorded;
mod stay_eager;

use drumline_parallel::Agreed;
use drumline_torch::TorchError;
use drumline_torch::cuda::{Graph, Pool, synchronize};
use tch::{Device, Kind, Tensor, no_grad};

use super::batch::Batch;
use super::context::Context;
use super::error::TrainerError;
use super::hooks::Hook;
use super::learner::{Computed, Learner};
use super::model::Model;
use super::step_mode::{Key, Parameters, Seen, Shapes, Wish, shapes};
use super::supply::{Supply, Window};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, guarded, with_causes};
use crate::quiet::guarded_quietly;
use compute::{compute, copied_to, record_whole};
pub(super) use own_stream::OwnStream;
use recorded::{Made, Recorded};
use stay_eager::{StayEager, check_recordable, first_line};

/// The graphs of a training; none where it stays eager.
pub(super) struct Graphs<B, O>(Option<Active<B, O>>);

/// What is recorded, or is to be.
struct Active<B, O> {
    pool: Pool,
    seen: Seen,
    watched: Watched,
    gradients: Option<Recorded<B, O>>,
    optimizer: OptimizerGraph,
    has_reported_betas: bool,
}

/// Tensors that must be as they were when a graph was recorded.
pub(super) struct Watched {
    /// All parameters of the model, also those that are frozen now.
    pub(super) variables: Vec<Tensor>,
    /// The tensors that this rank holds.
    pub(super) held: Vec<Tensor>,
}

enum OptimizerGraph {
    /// It was not recorded yet.
    Unrecorded,
    Recorded(Graph),
    /// It cannot be recorded.
    Eager,
}

impl OptimizerGraph {
    fn forget(&mut self) {
        if let Self::Recorded(_) = self {
            *self = Self::Unrecorded;
        }
    }
}

impl<B, O> Active<B, O> {
    fn new(watched: Watched) -> Result<Self, TorchError> {
        Ok(Self {
            pool: Pool::new()?,
            seen: Seen::default(),
            watched,
            gradients: None,
            optimizer: OptimizerGraph::Unrecorded,
            has_reported_betas: false,
        })
    }

    /// What a step of batches of these shapes depends on.
    fn key(&self, shapes: Shapes) -> Key {
        let Watched { variables, held } = &self.watched;
        Key { shapes, parameters: Parameters::of(variables, held) }
    }

    /// Drops the recordings, when none of them runs any more. Memory that graphs have used is not used for other ones.
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

impl<B: Batch, O> Graphs<B, O> {
    /// A training without graphs.
    pub(super) fn off() -> Self {
        Self(None)
    }

    /// A training on a GPU.
    pub(super) fn of(watched: Watched) -> Result<Self, TorchError> {
        Ok(Self(Some(Active::new(watched)?)))
    }

    /// The schedule has changed the optimizer's betas, which a graph would not see. Rank 0 reports it once.
    pub(super) fn note_betas(&mut self, rank: usize) {
        let Some(active) = &mut self.0 else { return };
        let is_news = matches!(active.optimizer, OptimizerGraph::Recorded(_) | OptimizerGraph::Unrecorded)
            && active.gradients.is_some()
            && !std::mem::replace(&mut active.has_reported_betas, true);
        if is_news && rank == 0 {
            tracing::info!("the optimizer does not run as a CUDA graph while the schedule changes its betas");
        }
    }

    /// Whether this rank can run a step of these batches as graphs. It is called once per step.
    pub(super) fn can_run<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        context: &Context<'_>,
        batches: &[B],
    ) -> bool {
        let Some(active) = self.0.as_mut().filter(|_| !context.tracer.is_on()) else { return false };
        let key = shapes(batches).map(|shapes| active.key(shapes));
        let recorded = active.gradients.as_ref().map(|recorded| &recorded.key);
        let is_recorded = recorded.is_some();
        let why = match active.seen.wish(key, recorded) {
            Wish::Eager => return false,
            Wish::Graph if is_recorded => return true,
            Wish::Graph => check_recordable(&*learner.engine, learner.scaler.as_ref()),
            Wish::Forget => match self.forget(learner, context) {
                Ok(()) => return false,
                Err(error) => Err(StayEager::Torch(error)),
            },
            Wish::Never(why) => Err(StayEager::Steps(why)),
        };
        if let Err(why) = &why {
            self.give_up(context, why);
        }
        why.is_ok()
    }

    /// Whether a step by graphs would have to be recorded first.
    pub(super) fn has_to_record(&self) -> bool {
        self.0.as_ref().is_some_and(|active| active.gradients.is_none())
    }

    /// Parameters were frozen, unfrozen or replaced, here or on another rank.
    fn forget<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        context: &Context<'_>,
    ) -> Result<(), TorchError> {
        // The optimizer may have to allocate the state of a parameter, in a step that is not recorded.
        learner.has_stepped = false;
        tracing::info!(
            rank = context.state.rank(),
            step = context.state.step,
            "CUDA graphs are recorded again: what is trained has changed"
        );
        self.0.as_mut().map_or(Ok(()), |active| active.forget(learner.device()))
    }

    /// Rank 0 reports the reason, once.
    fn give_up(&mut self, context: &Context<'_>, why: &StayEager) {
        self.0 = None;
        let why = why.to_string();
        let why = first_line(&why);
        match context.state.rank() {
            0 => tracing::warn!("steps do not run as CUDA graphs: {why}"),
            rank => tracing::debug!(rank, "steps do not run as CUDA graphs: {why}"),
        }
    }

    /// What [`Learner::gradients`] computes, by a graph. The next step's batches are taken while it runs.
    pub(super) fn gradients<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        context: &mut Context<'_>,
        step: GraphStep<'_, B>,
    ) -> Result<Computed, TrainerError> {
        let GraphStep { window, agreed, supply } = step;
        if agreed.record && !self.has_to_record() {
            self.forget(learner, context)?;
        }
        let Some(mut active) = self.0.take() else {
            return learner.gradients(context, window.batches, agreed);
        };
        let mut recorded = match active.gradients.take() {
            Some(recorded) => {
                recorded.load_inputs(&window, agreed.factor_of_sums())?;
                recorded
            }
            None => {
                let key = active.key(shapes(&window.batches).unwrap_or_default());
                let batches = window.batches.into_iter().map(|batch| copied_to(batch, learner.device()));
                let batches = batches.collect::<Result<Vec<B>, _>>()?;
                match self.record(
                    learner,
                    context,
                    &Recording { pool: active.pool, batches: &batches, agreed },
                )? {
                    Some(made) => Recorded::new(made, batches, key),
                    None => return learner.gradients(context, batches, agreed),
                }
            }
        };
        for _ in &recorded.batches {
            for hook in [Hook::BatchBegin, Hook::LossBegin, Hook::BackwardBegin] {
                context.call(hook);
            }
        }
        if active.key(Vec::new()).parameters != recorded.key.parameters {
            return Err(changed_too_late(context));
        }
        recorded.attach(&context.state.parameters)?;
        recorded.launch(context.state.step + 1)?;
        // This must come before anything that waits for the GPU.
        take_ahead(learner, context, supply, &mut recorded);
        score(learner, context, &recorded);
        let computed = recorded.made.read()?;
        active.gradients = Some(recorded);
        self.0 = Some(active);
        Ok(computed)
    }

    /// Records forward, loss and backward of these batches. Nothing of it runs. `None` if one of the ranks cannot: then
    /// all give up graphs, and the step can run eagerly.
    fn record<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        context: &mut Context<'_>,
        recording: &Recording<'_, B>,
    ) -> Result<Option<Made<O>>, TrainerError> {
        let agreed = recording.agreed;
        let options = (Kind::Double, learner.device());
        let factor = Tensor::f_full([0i64; 0], agreed.factor_of_sums(), options)?;
        if !learner.engine.communicates() {
            let made = guarded_quietly(|| Ok(record_whole(learner, context, recording, factor)?));
            return match made {
                Ok(made) => Ok(Some(made)),
                Err(failure) => {
                    let why = StayEager::Recording { cause: failure.text };
                    self.leave(learner, context, &why, agreed).map(|()| None)
                }
            };
        }
        let tried = try_recording(learner, context, recording, &factor);
        let failures = context.state.group.all_gather_object(&tried.as_ref().err().cloned())?;
        if let Some(failure) = SharedFailure::of(&failures) {
            let why = StayEager::Recording { cause: failure.to_string() };
            return self.leave(learner, context, &why, agreed).map(|()| None);
        }
        begin_again(learner, context, agreed)?;
        let made = record_whole(learner, context, recording, factor);
        // It is kept until now so that its memory is used again.
        drop(tried);
        made.map(Some).map_err(|error| recording_failed(context, error))
    }

    /// This step and all that follow will be eager.
    fn leave<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &Learner<'_, M, B>,
        context: &mut Context<'_>,
        why: &StayEager,
        agreed: &Agreed,
    ) -> Result<(), TrainerError> {
        self.give_up(context, why);
        begin_again(learner, context, agreed)
    }

    /// Steps the optimizer, by a graph where that is possible.
    pub(super) fn step_optimizer<M: Model<B, Output = O> + ?Sized>(
        &mut self,
        learner: &mut Learner<'_, M, B>,
        context: &mut Context<'_>,
    ) -> Result<(), TrainerError> {
        let state = &mut context.state;
        // The first step in this run allocates the optimizer's state. In fp16 all steps before may have been skipped.
        let is_first = !std::mem::replace(&mut learner.has_stepped, true);
        let is_changed = std::mem::take(&mut state.is_optimizer_changed);
        if let Some(active) = self.0.as_mut().filter(|_| is_changed) {
            active.optimizer.forget();
        }
        // Callbacks may have removed gradients, or set others.
        let recorded = self.0.as_ref().and_then(|active| active.gradients.as_ref());
        let is_attached = recorded.map_or(Ok(false), |recorded| recorded.is_attached(&state.parameters))?;
        let is_as_recorded = is_attached && !is_first && !is_changed;
        let Some(active) = self.0.as_mut().filter(|_| is_as_recorded) else {
            return Ok(learner.engine.step(&mut *state.optimizer)?);
        };
        state.optimizer.refresh_master_weights()?;
        if let OptimizerGraph::Unrecorded = active.optimizer {
            let recorded = guarded_quietly(|| {
                state.optimizer.keep_lr_on_device()?;
                Ok(Graph::record(active.pool, || learner.engine.step(&mut *state.optimizer))?)
            });
            active.optimizer = match recorded {
                Ok((graph, ())) => OptimizerGraph::Recorded(graph),
                Err(why) => {
                    if state.group.rank() == 0 {
                        tracing::warn!(
                            "the optimizer does not run as a CUDA graph: {}",
                            first_line(&why.text)
                        );
                    }
                    OptimizerGraph::Eager
                }
            };
        }
        match &active.optimizer {
            OptimizerGraph::Recorded(graph) => Ok(graph.launch()?),
            _ => Ok(learner.engine.step(&mut *state.optimizer)?),
        }
    }
}

/// A step that all ranks run as a graph.
pub(super) struct GraphStep<'s, B: Batch> {
    pub(super) window: Window<B>,
    pub(super) agreed: &'s Agreed,
    pub(super) supply: &'s mut Supply<B>,
}

/// What is recorded, and where its memory comes from.
struct Recording<'s, B> {
    pool: Pool,
    batches: &'s [B],
    agreed: &'s Agreed,
}

/// Takes the batches of the next step, and begins to copy them to the GPU.
fn take_ahead<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    context: &mut Context<'_>,
    supply: &mut Supply<B>,
    recorded: &mut Recorded<B, M::Output>,
) {
    let is_last = context.state.max_steps.is_some_and(|most| context.state.step + 1 >= most);
    if !supply.can_take_ahead() || is_last || context.hooks.failure().is_some() {
        return;
    }
    let mut window = if supply.is_on_device() {
        recorded.beside(|| supply.take(learner, context))
    } else {
        supply.take(learner, context)
    };
    recorded.begin_upload(&mut window);
    supply.keep_ahead(window);
}

/// The error of a rank that changed its parameters when the other ranks are about to launch their graphs.
fn changed_too_late(context: &Context<'_>) -> TrainerError {
    TrainerError::ParametersChanged { rank: context.state.rank(), step: context.state.step + 1 }
}

fn score<M: Model<B> + ?Sized, B: Batch>(
    learner: &mut Learner<'_, M, B>,
    context: &mut Context<'_>,
    recorded: &Recorded<B, M::Output>,
) {
    let scored = guarded(|| {
        let mut outputs = recorded.made.outputs.iter().zip(&recorded.batches);
        no_grad(|| outputs.try_for_each(|(output, batch)| learner.scores.update(output, batch)))
    });
    if let Err(failure) = scored {
        context.hooks.note(failure);
    }
}

/// Records this rank's part without communication, to find out whether that is possible.
fn try_recording<M: Model<B> + ?Sized, B: Batch>(
    learner: &mut Learner<'_, M, B>,
    context: &mut Context<'_>,
    recording: &Recording<'_, B>,
    factor: &Tensor,
) -> Result<Graph, LocalFailure> {
    guarded_quietly(|| {
        context.state.optimizer.zero_grad()?;
        let compute = || compute(learner, recording.batches, factor);
        let (graph, _) = Graph::record(recording.pool, || learner.engine.alone_with(compute))?;
        Ok(graph)
    })
}

/// Begins the step again, because a recording computes nothing.
fn begin_again<M: Model<B> + ?Sized, B: Batch>(
    learner: &Learner<'_, M, B>,
    context: &mut Context<'_>,
    agreed: &Agreed,
) -> Result<(), TrainerError> {
    context.state.optimizer.zero_grad()?;
    Ok(learner.engine.begin_step(agreed)?)
}

/// The error of a rank that cannot record while the others do.
fn recording_failed(context: &Context<'_>, error: TrainerError) -> TrainerError {
    match error {
        TrainerError::Comm(_) => error,
        other => TrainerError::Recording {
            rank: context.state.rank(),
            step: context.state.step + 1,
            cause: first_line(&with_causes(&other)).to_owned(),
        },
    }
}
