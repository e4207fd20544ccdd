//! The gradients of one unit: the memory that they go through, and this rank's rows of their mean.

use std::ops::Range;

use drumline_torch::cuda::Event;
use drumline_torch::{HeapTensor, Named, grad, set_grad, tensor_within};
use tch::Tensor;

use super::grads::device_of;
use super::groups::Groups;
use super::lane_jobs::{GradMemory, Reduce};
use super::unit::UnitPlan;
use super::weights::{OwnRows, Weights};
use crate::error::ParallelError;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A memory with a place for each gradient of a unit.
pub(super) struct Flat {
    pub(super) memory: GradMemory,
    /// For each member of the unit.
    pub(super) places: Vec<Tensor>,
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
pub(super) enum Through {
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
pub(super) struct UnitGrads {
    pub(super) plan: UnitPlan,
    pub(super) through: Through,
    /// The memory of this rank's rows, unless they stay in the unit's flat memory.
    own: Option<Tensor>,
    rows: Vec<RowGrad>,
    /// Whether the next reduction is added to earlier ones.
    adds: bool,
}

impl UnitGrads {
    pub(super) fn new(
        groups: &Groups,
        weights: &Weights,
        params: &[Named],
        slots: &[GradMemory],
    ) -> Result<Self> {
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
            // The first reduction fills all of it.
            _ => Some(Tensor::f_empty([layout.shard_len() as i64], (kind, device))?),
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
    pub(super) fn num_jobs(&self) -> usize {
        self.chunks().len().max(1)
    }

    /// The chunks in which it is reduced, if it is: a segment, and a range of each rank's elements in it.
    pub(super) fn chunks(&self) -> Vec<(usize, Range<usize>)> {
        let Through::Chunks { len, .. } = &self.through else { return Vec::new() };
        let mut chunks = Vec::new();
        for (index, segment) in self.plan.layout.segments().iter().enumerate() {
            let starts = (0..segment.shard_len).step_by((*len).max(1));
            chunks.extend(starts.map(|start| (index, start..(start + len).min(segment.shard_len))));
        }
        chunks
    }

    /// Begins a backward. Gradients that the program has not made undefined are added to.
    pub(super) fn begin(&mut self) -> Result {
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

    pub(super) fn settle(&mut self, used_anywhere: &[u8]) -> Result {
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
    pub(super) fn whole(&self, bucket: usize, memory: &GradMemory, ready: Option<Event>) -> Result<Reduce> {
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
    pub(super) fn fill(
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
    pub(super) fn chunk(
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
