//! State in host memory beside a GPU: the CPU steps units there, while others are copied and the GPU steps the rest.
//!
//! ```text
//!   GPU    parameters, gradients     state of the units that stay ─ step ─┐
//!             │ gradients    ▲ weights                                    ├─ next forward
//!   host   slot 0 / 1 / 2    twins ─ step of unit 0, 1, 2, … ─────────────┘
//! ```
//! A step begins when the gradients of all units are complete, so that their norm is known and clipping and skipped steps
//! are exact. Gradients of a unit are copied to a pinned slot; the optimizer steps the unit's twins in pinned memory on all
//! threads; their values are copied back. While unit k is stepped, gradients of the next ones and weights of unit k-1 are
//! copied. What the model computes next waits for all of them.
//!
//! A program that neither clips nor scales may step in the last backward: then the norm need not be known, and a unit is
//! stepped while the GPU computes the gradients of the next ones.
//!
//! The moments and master weights are never copied, so that they lie in ordinary memory.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};

use drumline_comm::{ProcessGroup, ReduceOp, available_memory};
use drumline_plan::{OffloadPlan, Room, Tier};
use drumline_torch::{Named, Optimizer, cuda, grad};
use tch::{Device, Tensor};

use super::completion::{Arrival, Completion};
use super::copier::Copier;
use super::host_memory::{HostMemory, NUM_SLOTS};
use super::options::{Offload, Place};
use super::reservation::{Stepped, Units, stepped_by_unit};
use super::twins::{TwinUnit, bytes_of};
use super::{Result, agree};
use crate::error::ParallelError;

/// One part in so many of a GPU's free memory is left for activations.
const PART_FOR_ACTIVATIONS: u64 = 4;
/// One part in so many of the free host memory is left for the program.
const PART_FOR_PROGRAM: u64 = 16;

/// State of which some lies in host memory.
pub(super) struct Beside {
    /// Dropped before the units, since it waits for copies from and to their memory.
    copier: Copier,
    units: Vec<TwinUnit>,
    /// Parameters whose state stays on the device.
    resident: Vec<Named>,
    num_slots: usize,
    /// The decision as a table.
    pub(super) note: String,
    /// Why its steps have ended.
    failure: Option<String>,
}

/// The bytes of a unit.
struct Sizes {
    state: Vec<u64>,
    /// Of parameters and gradients, as they are copied.
    copied: Vec<u64>,
}

impl Sizes {
    fn of(units: &[Vec<Stepped>]) -> Self {
        let state = |unit: &Vec<Stepped>| unit.iter().map(|stepped| stepped.bytes as u64).sum();
        Self {
            state: units.iter().map(state).collect(),
            copied: units.iter().map(|unit| bytes_of(unit) as u64).collect(),
        }
    }

    fn on_host(&self) -> Vec<u64> {
        self.state.iter().zip(&self.copied).map(|(state, copied)| state + copied).collect()
    }

    /// Of a slot into which all units fit.
    fn slot(&self) -> u64 {
        self.copied.iter().copied().max().unwrap_or(0)
    }
}

impl Beside {
    /// Decides which units lie in host memory, and lets the optimizer step them there. All ranks call it.
    pub(super) fn new(
        offload: &Offload,
        units: &Units,
        optimizer: &mut dyn Optimizer,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let stepped = agree(group, stepped_by_unit(units, optimizer))?;
        let sizes = Sizes::of(&stepped);
        let room = room(units, &sizes, optimizer, group)?;
        let plan = match offload.optimizer {
            Place::Auto(_) => OffloadPlan::beside_gpu(&sizes.state, &sizes.on_host(), room),
            _ => {
                let by_ratio = OffloadPlan::by_ratio(&sizes.state, offload.ratio, Tier::Host);
                by_ratio.in_host_memory(&sizes.on_host(), room)
            }
        };
        let plan = agree(group, plan.map_err(Into::into))?;
        let there = stepped.into_iter().zip(plan.tiers()).filter(|(_, tier)| **tier == Tier::Host);
        let memory = HostMemory::new(there.map(|(unit, _)| unit).collect(), units.device);
        let memory = agree(group, memory)?;
        let note = memory.note(&plan);
        agree(group, Self::with(memory, units.device, optimizer, note))
    }

    fn with(memory: HostMemory, device: Device, optimizer: &mut dyn Optimizer, note: String) -> Result<Self> {
        let HostMemory { units, num_slots, .. } = memory;
        let twin = |name: &str| {
            let mut twins = units.iter().flat_map(|unit: &TwinUnit| &unit.twins);
            twins.find(|twin| twin.parameter.name == name).map(|twin| twin.host.shallow_clone())
        };
        let parameters = optimizer.parameters();
        let resident = parameters.into_iter().filter(|named| twin(&named.name).is_none()).collect();
        if !units.is_empty() {
            // An optimizer that cannot would step other parameters once more with each unit.
            optimizer.limit_to_twins(false)?;
            optimizer.step_twins(&mut |named| twin(&named.name))?;
        }
        Ok(Self { units, resident, num_slots, copier: Copier::new(device)?, note, failure: None })
    }

    /// Whether the CPU makes a part of the step.
    pub(super) fn has_units(&self) -> bool {
        !self.units.is_empty()
    }

    /// The names of the parameters of each unit, and of all that are not in one.
    pub(super) fn groups(&self) -> Vec<Vec<String>> {
        if self.units.is_empty() {
            return Vec::new();
        }
        let names = |unit: &TwinUnit| unit.twins.iter().map(|twin| twin.parameter.name.clone()).collect();
        let resident = self.resident.iter().map(|named| named.name.clone()).collect();
        self.units.iter().map(names).chain([resident]).collect()
    }

    /// The program may have written to any parameter.
    pub(super) fn note_change(&mut self) {
        self.units.iter_mut().for_each(TwinUnit::note_change);
    }

    /// Makes the optimizer's step.
    pub(super) fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result {
        self.unless_failed(|beside| {
            beside.begin(optimizer)?;
            let (units, arrivals) = channel();
            for (unit, twins) in beside.units.iter().enumerate() {
                if twins.has_grads()? {
                    // The other end is there.
                    let _ = units.send(Arrival { unit, ready: Vec::new() });
                }
            }
            drop(units);
            // Twins have no gradients yet: a GPU makes this step while the CPU makes the others.
            beside.step_resident(optimizer)?;
            let limited = Limited::begin(optimizer)?;
            beside.step_units(&mut *limited.optimizer, &arrivals, false)?;
            beside.copier.end()
        })
    }

    /// Runs the last backward of a step, and steps each unit as soon as its gradients are complete.
    pub(super) fn step_in_backward(
        &mut self,
        optimizer: &mut dyn Optimizer,
        backward: &mut dyn FnMut() -> Result,
    ) -> Result {
        let (arrivals, watch) = Completion::watch(&self.units, self.copier.device())?;
        self.unless_failed(|beside| {
            beside.begin(optimizer)?;
            let limited = Limited::begin(optimizer)?;
            let (computed, stepped) = std::thread::scope(|scope| {
                let (units, optimizer) = (&mut *beside, &mut *limited.optimizer);
                let worker = scope.spawn(move || units.step_units(optimizer, &arrivals, true));
                let computed = backward().and_then(|()| watch.send_rest());
                drop(watch);
                let panicked = ParallelError::Internal { what: "a step in host memory has panicked" };
                (computed, worker.join().unwrap_or(Err(panicked)))
            });
            drop(limited);
            computed.and(stepped)?;
            beside.step_resident(optimizer)?;
            beside.copier.end()
        })
    }

    /// Runs it unless an earlier one has failed, after which some units may have made one step more than others.
    fn unless_failed(&mut self, body: impl FnOnce(&mut Self) -> Result) -> Result {
        if let Some(cause) = &self.failure {
            return Err(ParallelError::OffloadEnded { cause: cause.clone() });
        }
        // A panic ends the steps as an error does.
        self.failure = Some("a step has panicked".to_owned());
        let outcome = body(self);
        self.failure = outcome.as_ref().err().map(ToString::to_string);
        outcome
    }

    fn begin(&mut self, optimizer: &mut dyn Optimizer) -> Result {
        self.refresh_twins()?;
        optimizer.refresh_master_weights()?;
        self.copier.begin()
    }

    fn step_resident(&self, optimizer: &mut dyn Optimizer) -> Result {
        for named in &self.resident {
            if grad(&named.tensor)?.is_some() {
                return Ok(optimizer.step()?);
            }
        }
        Ok(())
    }

    /// Steps units in the order in which they arrive, until there are no more. In a backward the gradients of a unit are
    /// freed, so that there are never those of all.
    fn step_units(
        &mut self,
        optimizer: &mut dyn Optimizer,
        arrivals: &Receiver<Arrival>,
        is_in_backward: bool,
    ) -> Result {
        let _no_grad = tch::no_grad_guard();
        let (mut fetched, mut turn) = (VecDeque::new(), 0);
        loop {
            while fetched.len() < self.num_slots {
                let next = if fetched.is_empty() { arrivals.recv().ok() } else { arrivals.try_recv().ok() };
                let Some(Arrival { unit, ready }) = next else { break };
                let slot = turn % self.num_slots;
                let copies = self.copier.fetch(self.units[unit].begin(slot)?, &ready)?;
                fetched.push_back((unit, slot, copies));
                turn += 1;
            }
            let Some((unit, slot, copies)) = fetched.pop_front() else { return Ok(()) };
            copies.wait()?;
            let unit = &mut self.units[unit];
            if is_in_backward {
                unit.drop_gradients()?;
            }
            unit.set_grads(Some(slot))?;
            optimizer.step()?;
            unit.set_grads(None)?;
            self.copier.send(&unit.sent()?)?;
            unit.note_same();
        }
    }

    /// Gives twins the values that the program has written to parameters.
    fn refresh_twins(&mut self) -> Result {
        let _no_grad = tch::no_grad_guard();
        let changed: Vec<(Tensor, Tensor)> = self.units.iter().flat_map(TwinUnit::changed).collect();
        if changed.is_empty() {
            return Ok(());
        }
        self.copier.begin()?;
        self.copier.fetch(changed, &[])?.wait()?;
        self.units.iter_mut().for_each(TwinUnit::note_same);
        Ok(())
    }
}

/// Steps look at twins alone until this is dropped, also by a panic in backward.
struct Limited<'a> {
    optimizer: &'a mut dyn Optimizer,
}

impl<'a> Limited<'a> {
    fn begin(optimizer: &'a mut dyn Optimizer) -> Result<Self> {
        optimizer.limit_to_twins(true)?;
        Ok(Self { optimizer })
    }
}

impl Drop for Limited<'_> {
    fn drop(&mut self) {
        // It could be limited, so that the limit can be taken away.
        let _ = self.optimizer.limit_to_twins(false);
    }
}

/// What is free for each rank, the same on all.
fn room(units: &Units, sizes: &Sizes, optimizer: &dyn Optimizer, group: &ProcessGroup) -> Result<Room> {
    let num_ranks = group.ranks_on_node().len() as u64;
    let host = available_memory().map_or(u64::MAX, |free| free / num_ranks);
    let host = (host - host / PART_FOR_PROGRAM).saturating_sub(NUM_SLOTS as u64 * sizes.slot());
    let free = agree(group, free_on(units.device, host))?;
    // Copies that were made for the optimizer's first step are state.
    let free = (free - free / PART_FOR_ACTIVATIONS).saturating_sub(units.gradients);
    let mut least = [free + optimizer.held_bytes() as u64, host];
    group.all_reduce(&mut least, ReduceOp::Min)?;
    let [device, host] = least;
    Ok(Room { device, host, disk: 0 })
}

/// The free bytes of a device, which is like host memory if it is the CPU.
fn free_on(device: Device, host: u64) -> Result<u64> {
    let Device::Cuda(index) = device else { return Ok(host) };
    let memory = cuda::memory(index)?;
    Ok(memory.free + memory.reserved.saturating_sub(memory.allocated))
}

#[cfg(test)]
mod tests;
