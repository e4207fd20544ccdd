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

use drumline_torch::cuda::{Event, Stream};
use drumline_torch::{Named, grad, move_grad, set_grad};
use tch::{Device, Kind, Tensor};

use super::groups::Groups;
use super::lane_jobs::{GradMemory, Job, UnitWorker};
use super::unit::{LARGE, UnitPlan};
use super::unit_grads::{Flat, Through, UnitGrads};
use super::weights::Weights;
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

/// The elements of a gradient in the order in which those of its parameter lie in memory.
fn flat_like(grad: &Tensor, param: &Tensor) -> Result<Tensor> {
    let (size, stride) = (param.size(), param.stride());
    let place = (param.kind(), param.device());
    let in_order = if grad.is_sparse() || grad.stride() != stride {
        let mut made = Tensor::f_empty_strided(&size, &stride, place)?;
        // Dense already, unless it is of an embedding with sparse gradients.
        made.f_copy_(&if grad.is_sparse() { grad.f_to_dense(None, false)? } else { grad.shallow_clone() })?;
        made
    } else {
        grad.shallow_clone()
    };
    Ok(in_order.f_as_strided([param.numel() as i64], [1], None)?)
}

/// The device of a model's parameters.
pub(super) fn device_of(params: &[Named]) -> Device {
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
            let gradient = grad(leaf)?.map(|grad| flat_like(&grad, leaf)).transpose()?;
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
