//! What ranks with the same model do together in a step, whatever happens to their gradients: buffers of one rank,
//! synchronised norms, ranks without a batch, and backwards that are reduced or not.
//!
//! ```text
//!   begin_step ─▶ forward (buffers of one rank, norms of all) ─▶ backward ─▶ Reduction (`ddp`, `shard`)
//!                 or backward_nothing, where this rank has no batch
//! ```

mod norm_calls;
mod shared_buffers;

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};
use drumline_torch::{GradHook, Named, buffers, frozen, parameters};
use tch::Tensor;
use tch::nn::VarStore;

use crate::agreement::Agreed;
use crate::arena::Arena;
use crate::engine::Placed;
use crate::error::{NotRecordable, ParallelError};
use crate::layout::Caps;
use crate::reduction::Reduction;
use crate::sync_group::{SyncCall, SyncGroup};
use norm_calls::NormCalls;
use shared_buffers::SharedBuffers;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The tensors of a model, by what ranks do with them. A tensor with two names is there once.
pub(crate) struct ModelTensors {
    /// Trained.
    pub(crate) params: Vec<Named>,
    /// Parameters that are not trained.
    pub(crate) frozen: Vec<Named>,
    /// Changed by each forward.
    pub(crate) buffers: Vec<Named>,
    /// Second names of trained parameters.
    pub(crate) aliases: Vec<Alias>,
    /// What ranks do not share, in the order of `parameters` and `buffers`.
    pub(crate) ignored: Vec<Named>,
}

/// Another name of a parameter.
pub(crate) struct Alias {
    pub(crate) name: String,
    /// The name under which it is among the parameters.
    pub(crate) of: String,
}

impl ModelTensors {
    /// The tensors of a store, without the ignored ones. An error unless all ranks of the group have the same.
    pub(crate) fn of(store: &VarStore, ignored: &[String], group: &ProcessGroup) -> Result<Self> {
        let kept = |named: &Named| !ignored.contains(&named.name);
        let (mut params, mut ignored): (Vec<_>, Vec<_>) = parameters(store).into_iter().partition(kept);
        let (mut rest, left_out): (Vec<_>, Vec<_>) = buffers(store).into_iter().partition(kept);
        ignored.extend(left_out);
        // A tensor with two names has one gradient.
        let mut seen: HashMap<*mut c_void, String> = HashMap::new();
        let mut aliases = Vec::new();
        params.retain(|Named { name, tensor }| {
            if tensor.numel() == 0 {
                return true;
            }
            match seen.entry(tensor.data_ptr()) {
                Entry::Vacant(place) => {
                    place.insert(name.clone());
                    true
                }
                Entry::Occupied(first) => {
                    aliases.push(Alias { name: name.clone(), of: first.get().clone() });
                    false
                }
            }
        });
        crate::same_model::check(group, &[params.clone(), rest.clone()].concat())?;
        let mut frozen = frozen(store);
        frozen.retain(kept);
        let is_frozen = |named: &Named| frozen.iter().any(|frozen| frozen.name == named.name);
        rest.retain(|named| !is_frozen(named));
        Ok(Self { params, frozen, buffers: rest, aliases, ignored })
    }
}

impl Alias {
    /// The parts of the parameter, under this name.
    pub(crate) fn placed<'a>(&'a self, state: &'a [Placed]) -> impl Iterator<Item = Placed> + 'a {
        let parts = state.iter().filter(|placed| placed.name == self.of);
        parts.map(|placed| Placed { name: self.name.clone(), ..placed.clone() })
    }
}

/// The arguments of [`Synced::new`].
pub(crate) struct SyncedSetup {
    /// A group of its own, whose calls cannot mix with those of the program.
    pub(crate) group: Arc<ProcessGroup>,
    pub(crate) tensors: ModelTensors,
    /// `None` for a single rank that does not reduce.
    pub(crate) reduction: Option<Box<dyn Reduction>>,
    /// Whether a forward in training first broadcasts the buffers of rank 0.
    pub(crate) broadcast_buffers: bool,
    /// The group of the model's synchronised norms, if it has any.
    pub(crate) sync_group: Option<SyncGroup>,
}

/// What a backward does with gradients, and whether it is the last of its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackwardKind {
    /// They are accumulated on this rank.
    Accumulate,
    /// They are reduced, and so are those of later backwards of the step.
    ReducePart,
    /// They are reduced, and the step ends.
    ReduceLast,
}

/// What a rank shares with others.
struct WithOthers {
    hooks: Vec<GradHook>,
    reduction: Arc<Mutex<Box<dyn Reduction>>>,
    buffers: Option<SharedBuffers>,
}

impl WithOthers {
    fn reduction(&self) -> MutexGuard<'_, Box<dyn Reduction>> {
        self.reduction.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WithOthers {
    fn drop(&mut self) {
        // Breaks a cycle: parameters own their hooks, hooks own the reduction, and the reduction owns the parameters.
        self.hooks.clear();
    }
}

/// The steps of ranks that have the same model.
pub(crate) struct Synced {
    group: Arc<ProcessGroup>,
    params: Vec<Named>,
    /// Parameters that were frozen when this was made: their gradients are not reduced.
    frozen: Vec<Named>,
    /// `None` for a single rank.
    others: Option<WithOthers>,
    sync_group: Option<SyncGroup>,
    /// The calls of synchronised norms, for steps in which ranks have different numbers of batches.
    norm_calls: NormCalls,
    /// Whether backward reduces gradients.
    is_syncing: Cell<bool>,
    /// Whether the next forward begins a step: the previous backward was not inside `no_sync`.
    is_new_step: Cell<bool>,
    /// Whether `begin_step` has begun the current step, so that all its forwards belong to it.
    is_begun: Cell<bool>,
    /// The rank whose buffers are broadcast: rank 0, or with uneven inputs the last rank that has data.
    buffers_of: Cell<usize>,
    /// The factor of a loss before its backward.
    loss_factor: Cell<f64>,
}

impl Synced {
    /// All ranks of the group call it. Buffers become those of rank 0; parameters are up to the reduction.
    pub(crate) fn new(setup: SyncedSetup) -> Result<Self> {
        let SyncedSetup { group, tensors, reduction, broadcast_buffers, sync_group } = setup;
        let ModelTensors { params, frozen, buffers, .. } = tensors;
        let others = match reduction {
            None => None,
            Some(reduction) => {
                let reduction = Arc::new(Mutex::new(reduction));
                let buffers = SharedBuffers::new(group.clone(), buffers)?;
                buffers.broadcast(0)?;
                let hooks = hooks(&params, &reduction)?;
                Some(WithOthers { hooks, reduction, buffers: broadcast_buffers.then_some(buffers) })
            }
        };
        Ok(Self {
            group,
            params,
            frozen,
            others,
            norm_calls: NormCalls::new(sync_group.clone()),
            sync_group,
            is_syncing: Cell::new(true),
            is_new_step: Cell::new(true),
            is_begun: Cell::new(false),
            buffers_of: Cell::new(0),
            loss_factor: Cell::new(1.0),
        })
    }

    /// The group of the steps.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The parameters whose gradients are reduced.
    pub(crate) fn params(&self) -> &[Named] {
        &self.params
    }

    /// Whether backward reduces over ranks.
    pub(crate) fn is_reducing(&self) -> bool {
        self.others.is_some()
    }

    /// Whether forwards wait for other ranks, in synchronised norms.
    pub(crate) fn is_lockstep(&self) -> bool {
        self.sync_group.is_some()
    }

    /// Sets the factor of a loss before its backward.
    pub(crate) fn scale_losses(&self, factor: f64) {
        self.loss_factor.set(factor);
    }

    /// Sets the rank whose buffers are broadcast.
    pub(crate) fn use_buffers_of(&self, rank: usize) {
        self.buffers_of.set(rank);
    }

    /// Begins a step in which some ranks may have no data. All ranks call it and get the buffers of rank `buffers_of`.
    #[track_caller]
    pub(crate) fn begin_step(&self, buffers_of: usize) -> Result {
        let site = call_site();
        self.sync_group.iter().for_each(|group| group.called_at(site));
        self.buffers_of.set(buffers_of);
        self.is_new_step.set(true);
        self.is_begun.set(true);
        self.sync_buffers()
    }

    /// The same for the batches of an agreement.
    #[track_caller]
    pub(crate) fn begin_agreed_step(&self, agreed: &Agreed) -> Result {
        self.begin_step(agreed.buffers_of().unwrap_or(0))?;
        self.norm_calls.begin_step(&self.group, agreed)
    }

    /// Begins a micro-batch of an agreed step.
    pub(crate) fn begin_micro_batch(&self) {
        self.norm_calls.begin_micro_batch();
    }

    fn end_step(&self) {
        if self.is_begun.replace(false) {
            self.is_new_step.set(true);
        }
    }

    /// Broadcasts the buffers of rank 0, or with uneven inputs of the last rank that has data.
    #[track_caller]
    pub(crate) fn sync_buffers(&self) -> Result {
        let buffers = self.others.as_ref().and_then(|others| others.buffers.as_ref());
        let broadcast = |buffers: &SharedBuffers| buffers.broadcast(self.buffers_of.get());
        on_behalf_of(call_site(), || buffers.map_or(Ok(()), broadcast))
    }

    /// Runs a forward in training. The first of a step broadcasts buffers, unless `begin_step` has done it.
    #[track_caller]
    pub(crate) fn forward<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        let is_begun = self.is_begun.get();
        if !is_begun {
            // In a closure this would be the location of the closure.
            let site = call_site();
            self.sync_group.iter().for_each(|group| group.called_at(site));
        }
        if self.is_new_step.replace(self.is_syncing.get() && !is_begun) {
            if !is_begun {
                self.sync_buffers()?;
            }
            self.sync_group.iter().for_each(SyncGroup::begin_step);
            self.norm_calls.restart();
        }
        match &self.sync_group {
            Some(group) => Ok(group.catch(body)?),
            None => Ok(body()),
        }
    }

    /// The same for a micro-batch of an agreed step, whose backward is of this kind.
    #[track_caller]
    pub(crate) fn forward_micro_batch<R>(&self, kind: BackwardKind, body: impl FnOnce() -> R) -> Result<R> {
        self.norm_calls.note_forward();
        let site = call_site();
        self.in_kind(kind, || on_behalf_of(site, || self.forward(body)))
    }

    /// Runs `body`, inside [`no_sync`](Self::no_sync) if gradients are only accumulated.
    fn in_kind<R>(&self, kind: BackwardKind, body: impl FnOnce() -> R) -> R {
        match kind {
            BackwardKind::Accumulate => self.no_sync(body),
            BackwardKind::ReducePart | BackwardKind::ReduceLast => body(),
        }
    }

    /// What a backward of this kind does now: nothing is reduced inside [`no_sync`](Self::no_sync) and
    /// [`alone`](Self::alone), where other ranks do not take part.
    fn allowed(&self, kind: BackwardKind) -> BackwardKind {
        if self.is_syncing.get() { kind } else { BackwardKind::Accumulate }
    }

    /// Runs backward from the mean loss over this rank's batch.
    #[track_caller]
    pub(crate) fn backward(&self, loss: &Tensor) -> Result {
        self.backward_of(loss, BackwardKind::ReduceLast)
    }

    /// Runs backward of a kind.
    #[track_caller]
    pub(crate) fn backward_of(&self, loss: &Tensor, kind: BackwardKind) -> Result {
        let (site, kind) = (call_site(), self.allowed(kind));
        if kind == BackwardKind::ReduceLast {
            self.end_step();
        }
        let factor = self.loss_factor.get();
        let scaled = if factor == 1.0 { loss.shallow_clone() } else { loss * factor };
        let Some(others) = self.others.as_ref().filter(|_| kind != BackwardKind::Accumulate) else {
            return self.in_kind(kind, || Ok(scaled.f_backward()?));
        };
        self.check_frozen(others)?;
        others.reduction().begin(site)?;
        self.sync_group.iter().for_each(|group| group.called_at(site));
        if let Err(error) = scaled.f_backward() {
            let refusal = others.reduction().refusal();
            let cause = refusal.as_ref().map_or_else(|| error.to_string(), ToString::to_string);
            others.reduction().abandon(&cause);
            self.sync_group.iter().for_each(|group| group.abort(&cause));
            // libtorch passes on only the text of a layer's error; this returns the error itself.
            let failure = self.sync_group.as_ref().and_then(SyncGroup::failure);
            return Err(refusal.or_else(|| failure.map(Into::into)).unwrap_or_else(|| error.into()));
        }
        others.reduction().finish(None)
    }

    /// An error if a parameter was unfrozen after this was made: each rank would have a different gradient.
    fn check_frozen(&self, others: &WithOthers) -> Result {
        let Some(unfrozen) = self.frozen.iter().find(|named| named.tensor.requires_grad()) else {
            return Ok(());
        };
        let error = ParallelError::Unfrozen { rank: self.group.rank(), name: unfrozen.name.clone() };
        others.reduction().abandon(&error.to_string());
        Err(error)
    }

    /// Takes part in a backward of the other ranks without a batch: this rank's gradients are zero, and its
    /// synchronised norms have no samples.
    #[track_caller]
    pub(crate) fn backward_nothing(&self) -> Result {
        self.backward_nothing_of(BackwardKind::ReduceLast)
    }

    #[track_caller]
    fn backward_nothing_of(&self, kind: BackwardKind) -> Result {
        if self.sync_group.as_ref().is_some_and(|group| !group.has_stepped()) {
            return self.refuse_first_step();
        }
        let calls = self.sync_group.as_ref().map_or_else(Vec::new, SyncGroup::calls);
        self.backward_nothing_beside(&calls, kind)
    }

    /// The same for a micro-batch of an agreed step.
    #[track_caller]
    pub(crate) fn skip_micro_batch(&self, kind: BackwardKind) -> Result {
        let calls = self.norm_calls.take();
        match (kind, calls) {
            (BackwardKind::Accumulate, calls) => Ok(self.norm_calls.shadow(&calls.unwrap_or_default())?),
            (kind, Some(calls)) => self.backward_nothing_beside(&calls, kind),
            (kind, None) => self.backward_nothing_of(kind),
        }
    }

    /// A rank without data in its first step does not know the calls of synchronised norms, and so cannot take part in
    /// them.
    fn refuse_first_step(&self) -> Result {
        let Some(others) = self.others.as_ref().filter(|_| self.is_syncing.get()) else { return Ok(()) };
        let error = ParallelError::NoFirstStep { rank: self.group.rank() };
        let text = error.to_string();
        others.reduction().abandon(&text);
        self.sync_group.iter().for_each(|group| group.abort(&text));
        Err(error)
    }

    /// The same, if the other ranks' synchronised norms make `calls`, and not those of the step before. Gradients of
    /// earlier backwards inside [`no_sync`](Self::no_sync) are reduced.
    #[track_caller]
    pub(crate) fn join_backward(&self, calls: &[SyncCall]) -> Result {
        if let Some(others) = &self.others {
            self.check_frozen(others)?;
        }
        self.backward_nothing_beside(calls, BackwardKind::ReduceLast)
    }

    #[track_caller]
    fn backward_nothing_beside(&self, calls: &[SyncCall], kind: BackwardKind) -> Result {
        let (site, kind) = (call_site(), self.allowed(kind));
        if kind != BackwardKind::ReducePart {
            self.end_step();
        }
        let Some(others) = self.others.as_ref().filter(|_| kind != BackwardKind::Accumulate) else {
            return Ok(());
        };
        let mut reduction = others.reduction();
        reduction.begin(site)?;
        self.sync_group.iter().for_each(|group| group.called_at(site));
        match &self.sync_group {
            // This thread joins the calls of the other ranks' norms meanwhile.
            Some(sync_group) => reduction.finish(Some(&mut || Ok(sync_group.shadow(calls)?))),
            None => reduction.finish(None),
        }
    }

    /// Takes part in a micro-batch of the other ranks without a batch, where their forward and backward wait for `join`.
    #[track_caller]
    pub(crate) fn join_micro_batch(&self, kind: BackwardKind, join: &mut dyn FnMut() -> Result) -> Result {
        let (site, kind) = (call_site(), self.allowed(kind));
        if kind != BackwardKind::ReducePart {
            self.end_step();
        }
        let Some(others) = self.others.as_ref().filter(|_| kind != BackwardKind::Accumulate) else {
            return join();
        };
        let mut reduction = others.reduction();
        reduction.begin(site)?;
        reduction.finish(Some(join))
    }

    /// Backwards in `body` are not reduced: they accumulate gradients on this rank.
    pub(crate) fn no_sync<R>(&self, body: impl FnOnce() -> R) -> R {
        let _before = Restore { synced: self, to: self.is_syncing.get() };
        self.set_syncing(false);
        body()
    }

    /// Runs forwards and backwards of this rank alone: nothing in them waits for other ranks.
    pub(crate) fn alone(&self, body: &mut dyn FnMut()) {
        self.no_sync(|| match &self.sync_group {
            Some(group) => group.alone(body),
            None => body(),
        });
    }

    fn set_syncing(&self, is_syncing: bool) {
        self.is_syncing.set(is_syncing);
        self.others.iter().for_each(|others| others.reduction().allow_unreduced(!is_syncing));
    }

    /// The size in bytes of what is reduced together; empty for a single rank.
    pub(crate) fn reduced_bytes(&self) -> Vec<usize> {
        self.others.as_ref().map_or_else(Vec::new, |others| others.reduction().reduced_bytes())
    }

    /// An error that says why, if a step cannot be recorded as a CUDA graph.
    pub(crate) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        self.sync_group.as_ref().map_or(Ok(()), SyncGroup::is_recordable)?;
        self.others.as_ref().map_or(Ok(()), |others| others.reduction().is_recordable())
    }

    /// Aborts all groups that steps use: this rank will not continue, and other ranks may be waiting in any of them.
    pub(crate) fn abort(&self, cause: &str) {
        self.group.abort(cause);
        self.sync_group.iter().for_each(|group| group.abort(cause));
    }
}

struct Restore<'a> {
    synced: &'a Synced,
    to: bool,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        self.synced.set_syncing(self.to);
    }
}

fn hooks(params: &[Named], reduction: &Arc<Mutex<Box<dyn Reduction>>>) -> Result<Vec<GradHook>> {
    let hook = |(index, named): (usize, &Named)| {
        let reduction = reduction.clone();
        GradHook::new(&named.tensor, move || {
            let mut reduction = reduction.lock().unwrap_or_else(PoisonError::into_inner);
            reduction.note_ready(index)
        })
    };
    Ok(params.iter().enumerate().map(hook).collect::<std::result::Result<_, _>>()?)
}

/// Gives all ranks these tensors of rank 0.
pub(crate) fn broadcast_tensors(group: &ProcessGroup, tensors: Vec<Named>) -> Result {
    if tensors.is_empty() {
        return Ok(());
    }
    let order: Vec<usize> = (0..tensors.len()).collect();
    Arena::new(group, tensors, &order, Caps::NONE)?.broadcast_tensors(group, 0)
}
