//! Parameters of which each rank holds its rows, and which are gathered when an operation uses them: stage 3 on GPUs.
//!
//! ```text
//!   an operation uses unit b ─▶ Residency: b is in slot 1; gather c, which comes next, into slot 0
//!                                        │
//!   compute stream   ── a ── a ──┬─ (waits for b) ── b ── b ── b ──┬─ (waits for c) ── c
//!   gather stream             b ─┘└─ (waits for a) ── c ───────────┘
//! ```
//! The model does not know of it: an operation of the forward, of the backward and of recomputed activations gathers alike.
//! Two slots of the largest unit are all the memory that whole parameters need, and no step allocates any.
//!
//! An operation cannot fail here. What went wrong is noted, the operation computes something that nobody uses, and the
//! call of the engine returns the error.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use drumline_comm::{ProcessGroup, Subject, about, on_behalf_of};
use drumline_torch::cuda::{Event, Priority, Stream, StreamScope, Timing};
use drumline_torch::{Movable, TensorCollectives, UsageWatch};
use tch::{Device, Kind, Tensor};

use super::residency::{Gather, Residency, TooManyUnits};
use super::unit::UnitPlan;
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
}

impl GatheredUnit {
    pub(super) fn new(plan: &UnitPlan, movable: &Arc<Movable>, own: &Tensor) -> Self {
        let name = if plan.name.is_empty() { "the rest".to_owned() } else { plan.name.clone() };
        Self {
            subject: Subject::new(&format!("unit {name}")),
            name,
            plan: plan.clone(),
            movable: movable.clone(),
            own: own.shallow_clone(),
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
    /// The memory of units that are all gathered.
    whole: Vec<Tensor>,
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
            whole: Vec::new(),
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

    /// Runs a forward or a backward of all ranks.
    pub(super) fn together<R>(&self, site: Site, body: impl FnOnce() -> Result<R>) -> Result<R> {
        self.within(Mode::Together, site, body)
    }

    /// Runs a trial of this rank.
    pub(super) fn alone<R>(&self, site: Site, body: impl FnOnce() -> R) -> R {
        let ran = self.within(Mode::Alone, site, || Ok(body()));
        let mut state = self.0.state();
        state.residency.forget();
        let _ = state.rest();
        drop(state);
        self.0.leave_out(None);
        ran.expect("a trial gathers nothing, and so cannot fail")
    }

    fn within<R>(&self, mode: Mode, site: Site, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let before = {
            let mut state = self.0.state();
            state.site = site;
            match state.mode {
                // An evaluation inside: everything is there already.
                Mode::Whole => Mode::Whole,
                _ => std::mem::replace(&mut state.mode, mode),
            }
        };
        self.0.leave_out(None);
        let result = body();
        let mut state = self.0.state();
        state.mode = before;
        drop(state);
        self.0.leave_out(None);
        self.check()?;
        result
    }

    /// An error that says why, if gathers cannot be recorded in a CUDA graph.
    pub(super) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        Ok(self.0.state().group.is_recordable()?)
    }

    /// A backward has ended: later work waits for all gathers, so that they are part of a graph in which it is recorded.
    pub(super) fn join(&self) -> Result {
        self.0.state().join()
    }

    /// Begins a micro-batch that this rank computes.
    pub(super) fn begin_micro_batch(&self) {
        self.0.state().micro_batch.clear();
    }

    /// Takes part in the gathers of a micro-batch that other ranks compute.
    pub(super) fn join_micro_batch(&self, site: Site) -> Result {
        let uses = std::mem::take(&mut self.0.state().micro_batch);
        if uses.is_empty() {
            let rank = self.0.state().group.rank();
            return Err(ParallelError::NoFirstUse { rank });
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
        state.join()?;
        state.residency.end_step();
        state.rest()?;
        drop(state);
        self.0.leave_out(None);
        self.check()
    }

    /// Gathers all units, so that ranks can use them in any order and number. All ranks call it.
    pub(super) fn begin_whole(&self) -> Result {
        let mut state = self.0.state();
        let state = &mut *state;
        state.residency.forget();
        let mut whole = Vec::new();
        for unit in &state.units {
            let device = unit.own.device();
            let memory = Tensor::f_empty([unit.num_bytes() as i64], (Kind::Uint8, device))?;
            unit.gather(&state.group, &memory)?;
            unit.movable.point_at(&memory)?;
            whole.push(memory);
        }
        (state.whole, state.mode) = (whole, Mode::Whole);
        Ok(())
    }

    /// Frees the memory of [`begin_whole`](Self::begin_whole).
    pub(super) fn end_whole(&self) -> Result {
        let mut state = self.0.state();
        state.mode = Mode::Outside;
        state.rest()?;
        state.whole.clear();
        Ok(())
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
            Mode::Outside => Err(self.used_outside(units, operation)),
            Mode::Together | Mode::Alone => self.make_available(units, operation),
        };
        if let Err(error) = outcome {
            self.group.abort(&error.to_string());
            // The operation runs nevertheless, and must find memory.
            for unit in units {
                let _ = self.units[*unit].movable.point_at(&self.slots[0].bytes);
            }
            self.failure.get_or_insert(error);
        }
    }

    fn used_outside(&self, units: &[usize], operation: &str) -> ParallelError {
        let unit = units.first().map_or_else(String::new, |unit| self.units[*unit].name.clone());
        ParallelError::UsedOutsideStep { rank: self.group.rank(), unit, operation: operation.to_owned() }
    }

    fn make_available(&mut self, units: &[usize], operation: &str) -> Result {
        self.micro_batch.push(units.to_vec());
        let gathers = self.residency.use_units(units).map_err(|TooManyUnits { num_units, num_slots }| {
            let operation = operation.to_owned();
            ParallelError::TooManyUnits { rank: self.group.rank(), operation, num_units, num_slots }
        })?;
        for gather in gathers {
            self.gather(gather)?;
        }
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

    fn rest(&self) -> Result {
        self.units.iter().try_for_each(|unit| Ok(unit.movable.rest()?))
    }
}

/// Whether an operation of libtorch only makes another view, and reads nothing.
fn is_view(operation: &str) -> bool {
    const VIEWS: [&str; 9] =
        ["alias", "as_strided", "detach", "narrow", "set_data", "slice", "t", "transpose", "view"];
    VIEWS.contains(&operation.strip_prefix("aten::").unwrap_or(operation))
}
