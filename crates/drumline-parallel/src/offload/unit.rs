//! The tensors that an optimizer keeps for the parameters of one unit.

use std::ops::Range;

use drumline_torch::{Pages, Relocated};
use tch::Tensor;

use super::mover::Transfer;
use super::{Result, StateTensors};
use crate::error::ParallelError;

/// Tensors begin at whole lines of the CPU's caches.
pub(super) const LINE: usize = 64;

/// A unit's parameters, and where their state is.
pub(super) struct StateUnit {
    members: Vec<Member>,
    /// Its pages in the file.
    pub(super) region: Range<usize>,
}

/// A parameter.
pub(super) struct Member {
    /// Its place among all that the optimizer steps.
    pub(super) place: usize,
    pub(super) name: String,
    /// Its part of the unit's pages.
    pub(super) room: Range<usize>,
    held: Vec<Relocated>,
    /// Whether it has made a step, in which optimizers make its state.
    has_stepped: bool,
}

impl Member {
    pub(super) fn new(place: usize, name: String, room: Range<usize>) -> Self {
        Self { place, name, room, held: Vec::new(), has_stepped: false }
    }

    /// The tensors that are moved. Numbers such as the count of steps stay in memory.
    fn moved(tensors: &[Tensor]) -> impl Iterator<Item = &Tensor> {
        tensors.iter().filter(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes() > LINE)
    }

    /// Where in the unit's pages a tensor of these sizes is, after those before it.
    fn offsets(&self, sizes: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
        let mut next = self.room.start;
        sizes.map(move |size| {
            let offset = next;
            next += size.next_multiple_of(LINE);
            offset
        })
    }

    fn placed(&self) -> impl Iterator<Item = (&Relocated, usize)> {
        self.held.iter().zip(self.offsets(self.held.iter().map(Relocated::num_bytes)))
    }

    fn move_to(&self, pages: &Pages, start: usize) -> Result {
        self.placed().try_for_each(|(tensor, offset)| Ok(tensor.move_to(pages, start + offset)?))
    }

    fn is_home(&self, tensors: &[Tensor], pages: &Pages, start: usize) -> bool {
        let tensors: Vec<_> = Self::moved(tensors).collect();
        let is_there = |(tensor, (held, offset)): (&&Tensor, (&Relocated, usize))| {
            held.is_at(pages, start + offset) && tensor.data_ptr() as usize == pages.address(start + offset)
        };
        tensors.len() == self.held.len() && tensors.iter().zip(self.placed()).all(is_there)
    }

    fn take_in(&mut self, tensors: &[Tensor], buffer: &Pages) -> Result {
        let alone = |tensor: &Tensor| {
            let shared = || ParallelError::SharedState { parameter: self.name.clone() };
            Relocated::new(tensor)?.ok_or_else(shared)
        };
        let held: Vec<_> = Self::moved(tensors).map(alone).collect::<Result<_>>()?;
        let needed = held.iter().map(|tensor| tensor.num_bytes().next_multiple_of(LINE)).sum::<usize>();
        if needed > self.room.len() {
            let (parameter, room) = (self.name.clone(), self.room.len());
            return Err(ParallelError::StateGrew { parameter, needed, room });
        }
        self.held = held;
        let moved = self.placed().filter(|(tensor, offset)| !tensor.is_at(buffer, *offset));
        let mut moved: Vec<_> = moved.map(|(tensor, offset)| (tensor, offset, None)).collect();
        // The order of an optimizer's tensors may change: one in the buffer must not be written over before it is read.
        for (tensor, _, copy) in moved.iter_mut().filter(|(tensor, ..)| tensor.is_within(buffer)) {
            *copy = Some(tensor.bytes().to_vec());
        }
        for (tensor, offset, copy) in moved {
            let bytes = copy.as_deref().unwrap_or(tensor.bytes());
            buffer.bytes_mut(offset..offset + tensor.num_bytes()).copy_from_slice(bytes);
            tensor.move_to(buffer, offset)?;
        }
        Ok(())
    }
}

impl StateUnit {
    pub(super) fn new(members: Vec<Member>, region: Range<usize>) -> Self {
        Self { members, region }
    }

    /// The names of its parameters.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.name.as_str())
    }

    /// The places of its parameters among all that the optimizer steps.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.members.iter().map(|member| member.place)
    }

    /// Notes which of its parameters make a step. Returns whether it is the first one of some.
    pub(super) fn note_step(&mut self, makes_step: impl Fn(usize) -> bool) -> bool {
        let first = self.members.iter_mut().filter(|member| !member.has_stepped && makes_step(member.place));
        first.map(|member| member.has_stepped = true).count() > 0
    }

    /// What is read before its turn.
    pub(super) fn transfer(&self) -> Transfer {
        let has_state = self.members.iter().any(|member| !member.held.is_empty());
        has_state.then(|| self.region.clone())
    }

    /// Whether all its tensors are in the file.
    pub(super) fn is_home(&self, state: &StateTensors, file: &Pages) -> bool {
        let is_home =
            |member: &Member| member.is_home(state.of_parameter(&member.name), file, self.region.start);
        self.members.iter().all(is_home)
    }

    /// Its tensors are in this buffer from now on, to which their bytes were read.
    pub(super) fn move_to_buffer(&self, buffer: &Pages) -> Result {
        self.members.iter().try_for_each(|member| member.move_to(buffer, 0))
    }

    /// Its tensors are in the file from now on, to which their bytes are written next.
    pub(super) fn move_home(&self, file: &Pages) -> Result {
        self.members.iter().try_for_each(|member| member.move_to(file, self.region.start))
    }

    /// Copies tensors that the optimizer has made or loaded into the buffer, where the others are.
    pub(super) fn take_in(&mut self, state: &StateTensors, buffer: &Pages) -> Result {
        self.members
            .iter_mut()
            .try_for_each(|member| member.take_in(state.of_parameter(&member.name), buffer))
    }
}
