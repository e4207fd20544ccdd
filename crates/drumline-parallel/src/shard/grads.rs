//! Where the gradients of units are stored, and how each rank gets its rows of their mean.
//!
//! ```text
//!   stage 1        gradients ─▶ flat memory of the unit ─ reduce-scatter ─▶ own rows there
//!   stages 2, 3    gradients ─▶ slot 0 or 1, in turns   ─ reduce-scatter ─▶ own rows in a memory of their size
//! ```
//! With slots, a unit is stored when the reduction that used its slot before has ended. A gradient that comes earlier
//! stays where autograd has put it. On a GPU the gradients of a unit are moved together, when all of them are ready.
//!
//! A table that is larger than a slot is reduced in several chunks, each with a part of
//! every rank's rows. Reductions themselves: `lane_jobs.rs`.

use std::ops::Range;

use drumline_torch::cuda::{Event, Stream};
use drumline_torch::{HeapTensor, Named, grad, move_grad, set_grad, tensor_within};
use tch::{Device, Kind, Tensor};

use super::groups::Groups;
use super::lane_jobs::{GradMemory, Job, Reduce, UnitWorker};
use super::unit::{LARGE, UnitPlan};
use super::weights::{OwnRows, Weights};
use crate::error::{NotRecordable, ParallelError};
use crate::lane::Lane;
use crate::observer::Watch;
use crate::queues::Queues;
use crate::reducer::{OrderKnown, Places, Reducer, guessed_order};
use crate::reduction::Site;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// The number of slots: one is filled while the other is reduced.
const NUM_SLOTS: usize = 2;

/// What is kept of gradients between a reduction and the optimizer's step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// The flat memory of all gradients.
    All,
    /// The rows of this rank.
    OwnRows,
}

/// A memory with a place for each gradient of a unit.
struct Flat {
    memory: GradMemory,
    /// For each member of the unit.
    places: Vec<Tensor>,
}

impl Flat {
    fn new(memory: &GradMemory, plan: &UnitPlan, params: &[Named]) -> Result<Self> {
        let place = |(member, offset): (&usize, &usize)| {
            Ok(tensor_within(memory.tensor.tensor(), *offset, &params[*member].tensor)?)
        };
        let places = plan.members.iter().zip(plan.layout.offsets()).map(place);
        Ok(Self { memory: memory.clone(), places: places.collect::<Result<_>>()? })
    }
}

/// The memory that a unit's gradients go through.
enum Through {
    /// A memory of its own, in which the rows of this rank stay.
    Own(Flat),
    /// Slots into which it fits.
    Slots(Vec<Flat>),
    /// Slots that are smaller: this many elements of each rank at a time.
    Chunks { slots: Vec<GradMemory>, len: usize },
}

/// This rank's rows of a gradient.
struct RowGrad {
    param: usize,
    /// The rows of the parameter.
    leaf: Tensor,
    /// Where their gradient is after the reduction.
    place: Tensor,
    /// The gradient of earlier backwards, if the program has not made it undefined and the memory is used again.
    earlier: Option<Tensor>,
}

/// The gradients of a unit.
struct UnitGrads {
    plan: UnitPlan,
    through: Through,
    /// The memory of this rank's rows, unless they stay in the unit's flat memory.
    own: Option<Tensor>,
    rows: Vec<RowGrad>,
    /// Whether the next reduction is added to earlier ones.
    adds: bool,
}

/// The gradients of all units.
pub(super) struct ShardedGrads {
    groups: Groups,
    /// For gradients on a GPU.
    queues: Option<Queues>,
    params: Vec<Named>,
    units: Vec<UnitGrads>,
    /// The units in the order in which they are reduced.
    order: Vec<usize>,
    /// For each place in that order, the number of reductions before it.
    jobs_before: Vec<usize>,
    /// For each parameter: the place of its unit in that order.
    bucket_of: Vec<usize>,
    /// For each parameter: its unit, and its index there.
    member_of: Vec<(usize, usize)>,
    /// For each parameter: whether its gradient is stored.
    is_stored: Vec<bool>,
}

/// Makes the reducer of a sharded model.
#[track_caller]
pub(super) fn reducer(
    groups: &Groups,
    params: Vec<Named>,
    weights: &[Weights],
    kept: Kept,
    watch: Watch,
) -> Result<Reducer<ShardedGrads>> {
    let grads = ShardedGrads::new(groups, params, weights, kept)?;
    let longest = weights.iter().map(|unit| unit.plan.layout.shard_len()).max().unwrap_or(0);
    let stream = grads.queues.as_ref().map(|queues| queues.lane);
    let worker = UnitWorker::new(groups.clone(), watch.clone(), grads.device(), stream, longest);
    Ok(Reducer::new(groups.all.clone(), grads, Lane::new(worker, watch)?))
}

impl ShardedGrads {
    fn new(groups: &Groups, params: Vec<Named>, weights: &[Weights], kept: Kept) -> Result<Self> {
        let device = device_of(&params);
        let slots = match kept {
            Kept::All => Vec::new(),
            Kept::OwnRows => slots(groups, device, weights)?,
        };
        let unit = |weights: &Weights| UnitGrads::new(groups, weights, &params, &slots);
        let units = weights.iter().map(unit).collect::<Result<Vec<_>>>()?;
        let mut member_of = vec![(0, 0); params.len()];
        for (unit, grads) in units.iter().enumerate() {
            for (index, param) in grads.plan.members.iter().enumerate() {
                member_of[*param] = (unit, index);
            }
        }
        let is_stored = vec![false; params.len()];
        let (order, jobs_before, bucket_of) = (Vec::new(), Vec::new(), Vec::new());
        let (groups, queues) = (groups.clone(), Queues::of(device)?);
        let mut grads =
            Self { groups, queues, params, units, order, jobs_before, bucket_of, member_of, is_stored };
        grads.set_order(&guessed_order(grads.params.len()));
        Ok(grads)
    }

    fn device(&self) -> Device {
        device_of(&self.params)
    }

    /// Orders units by their last gradient in this order of parameters.
    fn set_order(&mut self, order: &[usize]) {
        let mut last = vec![0; self.units.len()];
        for (place, param) in order.iter().enumerate() {
            last[self.member_of[*param].0] = place;
        }
        self.order = (0..self.units.len()).collect();
        self.order.sort_by_key(|unit| last[*unit]);
        let mut position = vec![0; self.units.len()];
        self.jobs_before.clear();
        let mut num_jobs = 0;
        for (place, unit) in self.order.iter().enumerate() {
            position[*unit] = place;
            self.jobs_before.push(num_jobs);
            num_jobs += self.units[*unit].num_jobs();
        }
        self.bucket_of = self.member_of.iter().map(|(unit, _)| position[*unit]).collect();
    }

    /// The place of a parameter's gradient; `None` if it has none before its unit is sent, or this is still in use.
    fn free_place(&self, param: usize, lane: &mut Lane<Job>) -> Option<&Tensor> {
        let (unit, member) = self.member_of[param];
        let job = self.jobs_before[self.bucket_of[param]];
        match &self.units[unit].through {
            Through::Own(flat) => Some(&flat.places[member]),
            Through::Slots(slots) if lane.has_done(free_after(job)) => {
                Some(&slots[job % NUM_SLOTS].places[member])
            }
            Through::Slots(_) | Through::Chunks { .. } => None,
        }
    }

    /// Moves the gradient of a parameter into its place if that is free, or zeros if it has none. On a GPU gradients of a
    /// unit are moved together.
    fn move_in(&mut self, param: usize, lane: &mut Lane<Job>) -> Result {
        if let Some(queues) = &mut self.queues {
            return queues.note_current();
        }
        let Some(place) = self.free_place(param, lane) else { return Ok(()) };
        let leaf = &self.params[param].tensor;
        if move_grad(leaf, place)? {
            set_grad(leaf, None)?;
        } else {
            let _ = place.shallow_clone().f_zero_()?;
        }
        self.is_stored[param] = true;
        Ok(())
    }
}

impl ShardedGrads {
    /// Moves the gradients of a unit into their places in this memory, on a GPU. Returns an event after that.
    fn move_unit(&self, unit: usize, flat: &Flat) -> Result<Option<Event>> {
        let Some(queues) = &self.queues else { return Ok(None) };
        let members = &self.units[unit].plan.members;
        let leaves: Vec<&Tensor> = members.iter().map(|member| &self.params[*member].tensor).collect();
        for (leaf, place) in leaves.iter().zip(&flat.places) {
            if grad(leaf)?.is_none() {
                let _ = place.shallow_clone().f_zero_()?;
            }
        }
        let ready = queues.fill(&leaves, &flat.places.iter().collect::<Vec<_>>())?;
        leaves.iter().try_for_each(|leaf| set_grad(leaf, None))?;
        Ok(Some(ready))
    }
}

/// The device of a model's parameters.
fn device_of(params: &[Named]) -> Device {
    params.first().map_or(Device::Cpu, |named| named.tensor.device())
}

/// The number of reductions that must have ended before the slot of another is free.
fn free_after(job: usize) -> usize {
    (job + 1).saturating_sub(NUM_SLOTS)
}

/// Waits until a reduction's memory is free: on a GPU, until work after this finds it free.
fn wait_until_free(memory: &GradMemory, job: usize, lane: &mut Lane<Job>) -> Result {
    lane.wait_for(free_after(job));
    memory.wait_until_reduced()
}

/// Two slots for each kind of element, as large as the largest unit that is not a table of its own.
fn slots(groups: &Groups, device: Device, weights: &[Weights]) -> Result<Vec<GradMemory>> {
    let mut lens: Vec<(Kind, usize)> = Vec::new();
    for UnitPlan { kind, layout, members, .. } in weights.iter().map(|unit| &unit.plan) {
        let len = layout.flat_len();
        let len = if members.len() == 1 { len.min(LARGE.next_multiple_of(layout.num_ranks())) } else { len };
        match lens.iter_mut().find(|(of, _)| of == kind) {
            Some((_, longest)) => *longest = len.max(*longest),
            None => lens.push((*kind, len)),
        }
    }
    let slots = lens.iter().flat_map(|slot| [slot; NUM_SLOTS]);
    slots.map(|(kind, len)| GradMemory::zeros(groups, device, *kind, *len)).collect()
}

impl UnitGrads {
    fn new(groups: &Groups, weights: &Weights, params: &[Named], slots: &[GradMemory]) -> Result<Self> {
        let plan = weights.plan.clone();
        let (kind, layout) = (plan.kind, &plan.layout);
        let device = device_of(params);
        let slots: Vec<_> = slots.iter().filter(|slot| slot.tensor.kind() == kind).collect();
        let through = match slots.first().map(|slot| slot.tensor.tensor().numel()) {
            None => {
                let memory = GradMemory::zeros(groups, device, kind, layout.flat_len())?;
                Through::Own(Flat::new(&memory, &plan, params)?)
            }
            Some(len) if len >= layout.flat_len() => {
                let flats = slots.iter().map(|slot| Flat::new(slot, &plan, params));
                Through::Slots(flats.collect::<Result<_>>()?)
            }
            Some(len) => {
                Through::Chunks { slots: slots.into_iter().cloned().collect(), len: len / layout.num_ranks() }
            }
        };
        let own = match &through {
            Through::Own(_) => None,
            _ => Some(Tensor::f_zeros([layout.shard_len() as i64], (kind, device))?),
        };
        let rank = groups.shard.rank();
        let row = |rows: &OwnRows| {
            let (memory, place) = match (&through, &own) {
                (Through::Own(flat), _) => (flat.memory.tensor.tensor(), rows.range.start),
                (_, Some(own)) => (own, plan.own_place(rank, rows.range.start)),
                (_, None) => return Err(ParallelError::Internal { what: "a unit has no memory" }),
            };
            let place = tensor_within(memory, place, &rows.tensor)?;
            let leaf = rows.tensor.shallow_clone();
            Ok(RowGrad { param: rows.param, leaf, place, earlier: None })
        };
        let rows = weights.own.iter().map(row).collect::<Result<_>>()?;
        Ok(Self { plan, through, own, rows, adds: false })
    }

    /// The number of reductions.
    fn num_jobs(&self) -> usize {
        self.chunks().len().max(1)
    }

    /// The chunks in which it is reduced, if it is: a segment, and a range of each rank's elements in it.
    fn chunks(&self) -> Vec<(usize, Range<usize>)> {
        let Through::Chunks { len, .. } = &self.through else { return Vec::new() };
        let mut chunks = Vec::new();
        for (index, segment) in self.plan.layout.segments().iter().enumerate() {
            let starts = (0..segment.shard_len).step_by((*len).max(1));
            chunks.extend(starts.map(|start| (index, start..(start + len).min(segment.shard_len))));
        }
        chunks
    }

    /// Begins a backward. Gradients that the program has not made undefined are added to.
    fn begin(&mut self) -> Result {
        match &self.through {
            Through::Own(flat) => flat.memory.begin(),
            Through::Slots(slots) => slots.iter().for_each(|flat| flat.memory.begin()),
            Through::Chunks { slots, .. } => slots.iter().for_each(GradMemory::begin),
        }
        let held = self.rows.iter().map(|row| Ok(grad(&row.leaf)?.is_some()));
        let held: Vec<bool> = held.collect::<Result<_>>()?;
        self.adds = self.own.is_some() && held.contains(&true);
        for (row, is_held) in self.rows.iter_mut().zip(held) {
            if is_held && self.own.is_none() {
                // The memory is about to be used for new gradients.
                row.earlier = Some(row.place.copy());
            } else if !is_held && self.adds {
                let _ = row.place.f_zero_()?;
            }
        }
        Ok(())
    }

    fn settle(&mut self, used_anywhere: &[u8]) -> Result {
        for row in &mut self.rows {
            let earlier = row.earlier.take();
            if used_anywhere[row.param] == 1 {
                if let Some(earlier) = &earlier {
                    let _ = row.place.f_add_(earlier)?;
                }
                set_grad(&row.leaf, Some(&row.place))?;
            } else if let Some(earlier) = &earlier {
                row.place.f_copy_(earlier)?;
            }
        }
        Ok(())
    }

    /// The reduction of all of it, whose gradients are in this memory.
    fn whole(&self, bucket: usize, memory: &GradMemory, ready: Option<Event>) -> Result<Reduce> {
        let (mut parts, mut before) = (Vec::new(), 0);
        let num_ranks = self.plan.layout.num_ranks();
        for segment in self.plan.layout.segments() {
            let from = segment.start..segment.start + segment.shard_len * num_ranks;
            let own = self.own.as_ref();
            let into = own.map(|own| own.f_narrow(0, before, segment.shard_len as i64)).transpose()?;
            before += segment.shard_len as i64;
            parts.push((from, into));
        }
        Ok(Reduce { bucket, memory: memory.clone(), ready, parts, adds: self.adds })
    }

    /// Copies a chunk of the gradient into a slot: the same range of each rank's elements, one after the other.
    fn fill(
        &self,
        slot: &HeapTensor,
        segment: usize,
        range: &Range<usize>,
        gradient: Option<&Tensor>,
    ) -> Result {
        let segment = self.plan.layout.segments()[segment];
        let len = range.len() as i64;
        let total = self.plan.layout.num_elements();
        for rank in 0..self.plan.layout.num_ranks() {
            let mut place = slot.tensor().f_narrow(0, rank as i64 * len, len)?;
            let begin = segment.start + rank * segment.shard_len + range.start;
            // Behind the last row there is padding.
            let given = total.saturating_sub(begin).min(range.len()) as i64;
            match gradient {
                Some(gradient) if given > 0 => {
                    place.f_narrow(0, 0, given)?.f_copy_(&gradient.f_narrow(0, begin as i64, given)?)?;
                    let _ = place.f_narrow(0, given, len - given)?.f_zero_()?;
                }
                _ => drop(place.f_zero_()?),
            }
        }
        Ok(())
    }

    /// The reduction of a chunk that is in this slot.
    fn chunk(
        &self,
        bucket: usize,
        slot: &GradMemory,
        segment: usize,
        range: &Range<usize>,
    ) -> Result<Reduce> {
        let layout = &self.plan.layout;
        let before: usize = layout.segments()[..segment].iter().map(|segment| segment.shard_len).sum();
        let own = self.own.as_ref();
        let into = own.map(|own| own.f_narrow(0, (before + range.start) as i64, range.len() as i64));
        let parts = vec![(0..range.len() * layout.num_ranks(), into.transpose()?)];
        Ok(Reduce { bucket, memory: slot.clone(), ready: None, parts, adds: self.adds })
    }
}

impl Places for ShardedGrads {
    type Job = Job;

    fn params(&self) -> &[Named] {
        &self.params
    }

    fn bucket_of(&self) -> &[usize] {
        &self.bucket_of
    }

    fn begin(&mut self) -> Result {
        let _no_grad = tch::no_grad_guard();
        self.is_stored.fill(false);
        self.queues.iter_mut().for_each(Queues::begin);
        self.units.iter_mut().try_for_each(UnitGrads::begin)
    }

    fn store(&mut self, param: usize, lane: &mut Lane<Job>) -> Result {
        self.move_in(param, lane)
    }

    fn store_missing(&mut self, param: usize, lane: &mut Lane<Job>) -> Result<bool> {
        let had_gradient = grad(&self.params[param].tensor)?.is_some();
        self.move_in(param, lane)?;
        Ok(had_gradient)
    }

    fn send(&mut self, bucket: usize, site: Site, lane: &mut Lane<Job>) -> Result {
        let _no_grad = tch::no_grad_guard();
        let (index, job) = (self.order[bucket], self.jobs_before[bucket]);
        if let Through::Chunks { slots, .. } = &self.units[index].through {
            let unit = &self.units[index];
            let leaf = &self.params[unit.plan.members[0]].tensor;
            let gradient = grad(leaf)?.map(|grad| grad.f_contiguous()?.f_view([-1])).transpose()?;
            self.queues.as_ref().map_or(Ok(()), |queues| queues.gather_streams().map(drop))?;
            for (chunk, (segment, range)) in unit.chunks().iter().enumerate() {
                let slot = &slots[(job + chunk) % NUM_SLOTS];
                wait_until_free(slot, job + chunk, lane)?;
                unit.fill(&slot.tensor, *segment, range, gradient.as_ref())?;
                let mut reduce = unit.chunk(bucket, slot, *segment, range)?;
                reduce.ready = self.queues.as_ref().map(Queues::mark).transpose()?;
                lane.send(site, Job::Reduce(reduce));
            }
            return Ok(set_grad(leaf, None)?);
        }
        let flat = match &self.units[index].through {
            // Nothing else uses its memory in this backward.
            Through::Own(flat) => flat,
            Through::Slots(slots) => {
                let flat = &slots[job % NUM_SLOTS];
                wait_until_free(&flat.memory, job, lane)?;
                flat
            }
            Through::Chunks { .. } => return Ok(()),
        };
        let ready = self.move_unit(index, flat)?;
        let reduce = self.units[index].whole(bucket, &flat.memory, ready)?;
        if self.queues.is_none() {
            for param in self.units[index].plan.members.clone() {
                if !self.is_stored[param] {
                    self.move_in(param, lane)?;
                }
            }
        }
        lane.send(site, Job::Reduce(reduce));
        Ok(())
    }

    fn flags(&self, used: Vec<u8>) -> Job {
        Job::Flags(used)
    }

    fn settle(&mut self, _: &[u8], used_anywhere: &[u8]) -> Result {
        let _no_grad = tch::no_grad_guard();
        self.queues.as_ref().map_or(Ok(()), Queues::join)?;
        self.units.iter_mut().try_for_each(|unit| unit.settle(used_anywhere))
    }

    fn reorder(&mut self, order: &[usize]) -> Result {
        self.set_order(order);
        Ok(())
    }

    fn bytes(&self) -> Vec<usize> {
        let bytes = |plan: &UnitPlan| plan.layout.flat_len() * plan.kind.elt_size_in_bytes();
        self.order.iter().map(|unit| bytes(&self.units[*unit].plan)).collect()
    }

    fn abort(&self, cause: &str) {
        self.groups.abort(cause);
    }

    fn stream(&self) -> Result<Option<Stream>> {
        self.queues.as_ref().map(Queues::current).transpose()
    }

    fn is_recordable(&self, order: OrderKnown) -> std::result::Result<(), NotRecordable> {
        match (&self.queues, order) {
            (None, _) => Err(NotRecordable::GradientsOnHost),
            (Some(_), OrderKnown::NotYet) => Err(NotRecordable::OrderNotKnown),
            (Some(_), OrderKnown::Yes) => self.groups.are_recordable(),
        }
    }
}
