//! Parameters of which each rank holds its rows, and which are gathered when an operation uses them: stage 3 on GPUs.
//!
//! ```text
//!   an operation uses unit b ─▶ Residency: b is in slot 1; gather c, which comes next, into slot 0
//!                                        │
//!   compute stream   ── a ── a ──┬─ (waits for b) ── b ── b ── b ──┬─ (waits for c) ── c
//!   gather stream             b ─┘└─ (waits for a) ── c ───────────┘
//! ```
//! The model needs no change: an operation of the forward, of the backward and of recomputed activations gathers alike.
//! Whole parameters lie in two slots of the largest unit, and no step allocates memory for them. Copies that autograd
//! keeps until backward, such as autocast's of f32 parameters, are beside that.
//!
//! An operation cannot fail here. What went wrong is noted, the operation computes something that nobody uses, and the
//! call of the engine returns the error.

mod evaluation;

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use drumline_comm::{ProcessGroup, ReduceOp, Subject, about, on_behalf_of};
use drumline_torch::cuda::{Event, Priority, Stream, StreamScope, Timing};
use drumline_torch::{KERNEL, Movable, TensorCollectives, UsageWatch};
use tch::{Device, Kind, Tensor};

use evaluation::Counted;

use super::residency::{Ahead, Gather, Residency, TooManyUnits};
use super::unit::UnitPlan;
use super::weights::InFile;
use crate::error::{NotRecordable, ParallelError};
use crate::reduction::Site;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The number of slots: one is used while the next unit is gathered into the other.
const NUM_SLOTS: usize = 2;

/// A unit whose rows are divided among ranks.
pub(super) struct GatheredUnit {
    name: String,
    subject: Subject,
    plan: UnitPlan,
    /// What the parameters are views of.
    movable: Arc<Movable>,
    /// This rank's part of each segment, one after the other.
    own: Tensor,
    /// Where it is, if that is a file.
    file: Option<InFile>,
}

impl GatheredUnit {
    pub(super) fn new(plan: &UnitPlan, movable: &Arc<Movable>, own: &Tensor, file: Option<InFile>) -> Self {
        let name = if plan.name.is_empty() { "the rest".to_owned() } else { plan.name.clone() };
        Self {
            subject: Subject::new(&format!("unit {name}")),
            name,
            plan: plan.clone(),
            movable: movable.clone(),
            own: own.shallow_clone(),
            file,
        }
    }

    fn num_bytes(&self) -> usize {
        self.plan.layout.flat_len() * self.plan.kind.elt_size_in_bytes()
    }

    /// Gathers all ranks' parts into `memory`.
    fn gather(&self, group: &ProcessGroup, memory: &Tensor) -> Result {
        let all = memory.f_narrow(0, 0, self.num_bytes() as i64)?.f_view_dtype(self.plan.kind)?;
        let mut before = 0;
        for segment in self.plan.layout.segments() {
            let len = segment.shard_len as i64;
            let mut whole = all.f_narrow(0, segment.start as i64, len * group.size() as i64)?;
            about(self.subject, || {
                group.all_gather_into_tensor(&mut whole, &self.own.f_narrow(0, before, len)?)
            })?;
            before += len;
        }
        self.file.iter().for_each(InFile::forget);
        Ok(())
    }
}

/// What a use of parameters means now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Nothing has begun: other ranks do not gather.
    Outside,
    /// All ranks make the same uses.
    Together,
    /// This rank makes a trial whose results are not used: nothing is gathered.
    Alone,
    /// All units are gathered.
    Whole,
}

struct Slot {
    bytes: Tensor,
    /// Is recorded when a unit is gathered; only on a GPU.
    gathered: Option<Event>,
}

/// The streams of a GPU.
struct Streams {
    device: usize,
    gather: Stream,
    /// Whether it has work that nothing waits for yet.
    is_busy: Cell<bool>,
}

struct State {
    group: Arc<ProcessGroup>,
    units: Vec<GatheredUnit>,
    slots: Vec<Slot>,
    streams: Option<Streams>,
    residency: Residency,
    mode: Mode,
    /// Where the program called the engine.
    site: Site,
    /// The uses of the last micro-batch that this rank has computed.
    micro_batch: Vec<Vec<usize>>,
    /// Whether that micro-batch has ended: the next forward begins another one.
    has_ended: bool,
    /// The memory of units that are all gathered.
    whole: Vec<Tensor>,
    is_evaluating: bool,
    /// An evaluation in which units are gathered when they are used.
    counted: Option<Counted>,
    failure: Option<ParallelError>,
}

struct Shared {
    state: Mutex<State>,
    watch: OnceLock<UsageWatch>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used(&self, units: &[usize], operation: &str) {
        let mut state = self.state();
        state.use_units(units, operation);
        let is_known = state.failure.is_none() && matches!(state.mode, Mode::Together | Mode::Alone);
        self.leave_out(match units {
            [unit] if is_known => Some(*unit),
            _ => None,
        });
    }

    fn leave_out(&self, unit: Option<usize>) {
        self.watch.get().iter().for_each(|watch| watch.leave_out(unit));
    }
}

/// Gathers units when they are used.
pub(super) struct Gatherer(Arc<Shared>);

/// A mode, until this is dropped.
struct InMode<'a> {
    shared: &'a Shared,
    before: Mode,
}

impl Drop for InMode<'_> {
    fn drop(&mut self) {
        self.shared.state().mode = self.before;
        self.shared.leave_out(None);
    }
}

impl Drop for Gatherer {
    fn drop(&mut self) {
        // The slots are freed. Parameters that live longer have no memory, rather than that of others.
        let _ = self.0.state().rest();
    }
}

impl Gatherer {
    pub(super) fn new(group: &Arc<ProcessGroup>, units: Vec<GatheredUnit>, device: Device) -> Result<Self> {
        let streams = match device {
            Device::Cuda(device) => {
                let gather = Stream::new(device, Priority::High)?;
                Some(Streams { device, gather, is_busy: Cell::new(false) })
            }
            _ => None,
        };
        let bytes = units.iter().map(GatheredUnit::num_bytes).max().unwrap_or(0);
        let slot = || {
            let bytes = Tensor::f_zeros([bytes as i64], (Kind::Uint8, device))?;
            let gathered = streams.as_ref().map(|_| Event::new(Timing::Off)).transpose()?;
            Ok(Slot { bytes, gathered })
        };
        let slots = (0..NUM_SLOTS).map(|_| slot()).collect::<Result<_>>()?;
        let movables: Vec<Arc<Movable>> = units.iter().map(|unit| unit.movable.clone()).collect();
        let state = Mutex::new(State {
            group: group.clone(),
            units,
            slots,
            streams,
            residency: Residency::new(NUM_SLOTS),
            mode: Mode::Outside,
            site: std::panic::Location::caller(),
            micro_batch: Vec::new(),
            has_ended: false,
            whole: Vec::new(),
            is_evaluating: false,
            counted: None,
            failure: None,
        });
        let shared = Arc::new(Shared { state, watch: OnceLock::new() });
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        let watched: Vec<&Tensor> = movables.iter().map(|movable| movable.tensor()).collect();
        let watch = UsageWatch::new(&watched, move |units, operation| {
            weak.upgrade().iter().for_each(|shared| shared.used(units, operation));
        })?;
        shared.watch.get_or_init(|| watch);
        Ok(Self(shared))
    }

    /// Runs a trial of this rank, of which nothing stays.
    pub(super) fn alone<R>(&self, site: Site, body: impl FnOnce() -> R) -> R {
        struct Before<'a> {
            shared: &'a Shared,
            residency: Residency,
            micro_batch: Vec<Vec<usize>>,
            has_ended: bool,
            failure: Option<ParallelError>,
        }
        impl Drop for Before<'_> {
            fn drop(&mut self) {
                let mut state = self.shared.state();
                std::mem::swap(&mut state.residency, &mut self.residency);
                std::mem::swap(&mut state.micro_batch, &mut self.micro_batch);
                (state.has_ended, state.failure) = (self.has_ended, self.failure.take());
                // Moving a tensor does not fail.
                let _ = state.rest();
                let _ = state.point_held();
            }
        }
        let _before = {
            let mut state = self.0.state();
            let residency = std::mem::replace(&mut state.residency, Residency::new(NUM_SLOTS));
            let (micro_batch, failure) = (std::mem::take(&mut state.micro_batch), state.failure.take());
            Before { shared: &self.0, residency, micro_batch, has_ended: state.has_ended, failure }
        };
        let _mode = self.enter(Mode::Alone, site);
        body()
    }

    /// Runs a forward or a backward of all ranks.
    pub(super) fn together<R>(&self, site: Site, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let result = {
            let _mode = self.enter(Mode::Together, site);
            body()
        };
        self.check()?;
        result
    }

    /// Sets the mode until the guard is dropped. Inside a trial or an evaluation it stays.
    fn enter(&self, mode: Mode, site: Site) -> InMode<'_> {
        let mut state = self.0.state();
        state.site = site;
        let before = state.mode;
        if !matches!(before, Mode::Whole | Mode::Alone) {
            state.mode = mode;
        }
        drop(state);
        self.0.leave_out(None);
        InMode { shared: &self.0, before }
    }

    /// An error that says why, if gathers cannot be recorded in a CUDA graph.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        Ok(self.0.state().group.is_recordable()?)
    }

    /// A backward has ended: later work waits for all gathers, so that they are part of a graph in which it is recorded.
    pub(super) fn end_backward(&self) -> Result {
        let mut state = self.0.state();
        state.has_ended = true;
        state.join()
    }

    /// Begins a micro-batch. What the one before has used is known until this one computes something.
    pub(super) fn begin_micro_batch(&self) {
        self.0.state().has_ended = true;
    }

    /// Begins a forward: the first of a micro-batch, unless there was no backward since the one before.
    pub(super) fn begin_forward(&self) {
        let mut state = self.0.state();
        if std::mem::take(&mut state.has_ended) {
            state.micro_batch.clear();
        }
    }

    /// Begins a step in which some rank has no batch. If a rank does not know yet which units a micro-batch uses, all units
    /// are gathered for this step. All ranks call it.
    pub(super) fn begin_uneven_step(&self) -> Result {
        let mut state = self.0.state();
        let mut all_know = [u8::from(!state.micro_batch.is_empty())];
        state.group.all_reduce(&mut all_know, ReduceOp::Min)?;
        if all_know[0] == 0 { state.gather_whole() } else { Ok(()) }
    }

    /// Takes part in the gathers of a micro-batch that other ranks compute.
    pub(super) fn join_micro_batch(&self, site: Site) -> Result {
        if self.0.state().mode == Mode::Whole {
            return Ok(());
        }
        let uses = std::mem::take(&mut self.0.state().micro_batch);
        if uses.is_empty() {
            return Err(ParallelError::NoFirstUse { rank: self.0.state().group.rank() });
        }
        let joined = self.together(site, || {
            let mut state = self.0.state();
            uses.iter().for_each(|units| state.use_units(units, "a micro-batch without samples"));
            Ok(())
        });
        self.0.state().micro_batch = uses;
        joined
    }

    /// Parameters have changed, or are about to.
    pub(super) fn end_step(&self) -> Result {
        let mut state = self.0.state();
        if state.is_evaluating {
            let expected = "outside of it; try after end_evaluation";
            return Err(ParallelError::value(
                "the place to change parameters",
                "inside an evaluation",
                expected,
            ));
        }
        state.join()?;
        state.residency.end_step();
        state.end_whole()?;
        drop(state);
        self.0.leave_out(None);
        self.check()
    }

    /// The first error since the last call.
    pub(super) fn check(&self) -> Result {
        self.0.state().failure.take().map_or(Ok(()), Err)
    }
}

impl State {
    fn use_units(&mut self, units: &[usize], operation: &str) {
        let outcome = match self.mode {
            Mode::Whole => return,
            Mode::Outside if is_view(operation) => return,
            // What was to be gathered before may be missing, and nothing that is computed now is used.
            _ if self.failure.is_some() => return self.point_anywhere(units),
            Mode::Outside => Err(self.used_outside(units, operation)),
            Mode::Together | Mode::Alone => self.make_available(units, operation),
        };
        if let Err(error) = outcome {
            if self.mode != Mode::Alone {
                self.group.abort(&error.to_string());
            }
            self.point_anywhere(units);
            self.failure.get_or_insert(error);
        }
    }

    /// An operation runs although something has failed, and must find memory.
    fn point_anywhere(&self, units: &[usize]) {
        for unit in units {
            let _ = self.units[*unit].movable.point_at(&self.slots[0].bytes);
        }
    }

    fn used_outside(&self, units: &[usize], operation: &str) -> ParallelError {
        let unit = units.first().map_or_else(String::new, |unit| self.units[*unit].name.clone());
        ParallelError::UsedOutsideStep { rank: self.group.rank(), unit, operation: operation.to_owned() }
    }

    fn make_available(&mut self, units: &[usize], operation: &str) -> Result {
        self.micro_batch.push(units.to_vec());
        // A kernel takes the addresses of its arguments one after the other: none of them may be moved meanwhile.
        let ahead = if operation == KERNEL { Ahead::No } else { Ahead::Yes };
        let gathers =
            self.residency.use_units(units, ahead).map_err(|TooManyUnits { num_units, num_slots }| {
                let operation = operation.to_owned();
                ParallelError::TooManyUnits { rank: self.group.rank(), operation, num_units, num_slots }
            })?;
        for gather in gathers {
            self.gather(gather)?;
        }
        let soon = self.residency.second_next().and_then(|unit| self.units[unit].file.as_ref());
        soon.into_iter().for_each(InFile::will_need);
        let Some(Streams { device, .. }) = &self.streams else { return Ok(()) };
        if self.mode == Mode::Alone {
            return Ok(());
        }
        let current = Stream::current(*device)?;
        for unit in units {
            let slot = self.residency.slot_of(*unit).map(|slot| &self.slots[slot]);
            if let Some(gathered) = slot.and_then(|slot| slot.gathered.as_ref()) {
                current.wait_for(gathered)?;
            }
        }
        Ok(())
    }

    fn gather(&self, Gather { unit, slot, evicted }: Gather) -> Result {
        if let Some(evicted) = evicted {
            self.units[evicted].movable.rest()?;
        }
        let (unit, slot) = (&self.units[unit], &self.slots[slot]);
        unit.movable.point_at(&slot.bytes)?;
        if self.mode == Mode::Alone {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let _on_stream = self.enter_stream()?;
        on_behalf_of(self.site, || unit.gather(&self.group, &slot.bytes))?;
        if let (Some(streams), Some(gathered)) = (&self.streams, &slot.gathered) {
            gathered.record(streams.gather)?;
        }
        Ok(())
    }

    /// Gathers run beside the model, after what has used the slot before.
    fn enter_stream(&self) -> Result<Option<StreamScope>> {
        let Some(Streams { device, gather, is_busy }) = &self.streams else { return Ok(None) };
        gather.wait_for_stream(Stream::current(*device)?)?;
        is_busy.set(true);
        Ok(Some(gather.enter()?))
    }

    /// Makes later work of this thread wait for all gathers.
    fn join(&self) -> Result {
        match &self.streams {
            Some(Streams { device, gather, is_busy }) if is_busy.take() => {
                Ok(Stream::current(*device)?.wait_for_stream(*gather)?)
            }
            _ => Ok(()),
        }
    }

    /// Points the units in slots at them.
    fn point_held(&self) -> Result {
        self.residency
            .held()
            .try_for_each(|(unit, slot)| Ok(self.units[unit].movable.point_at(&self.slots[slot].bytes)?))
    }

    fn rest(&self) -> Result {
        self.units.iter().try_for_each(|unit| Ok(unit.movable.rest()?))
    }
}

/// Whether an operation of libtorch only makes another view, and reads nothing.
fn is_view(operation: &str) -> bool {
    const VIEWS: [&str; 16] = [
        "alias",
        "as_strided",
        "detach",
        "expand",
        "flatten",
        "narrow",
        "permute",
        "select",
        "set_data",
        "slice",
        "squeeze",
        "t",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    ];
    VIEWS.contains(&operation.strip_prefix("aten::").unwrap_or(operation))
}
