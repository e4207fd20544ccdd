//! Messages under way on this rank, and which of them something that arrives is for.

use super::{P2p, Source, Way};
use crate::shm::Stop;
use crate::tcp::frame::MailHeader;

/// A message under way; see [`Scope::isend`](super::Scope::isend).
#[derive(Debug)]
pub(crate) struct Slot<'a> {
    pub(super) message: P2p<'a>,
    /// Bytes moved, header included.
    pub(super) moved: usize,
    /// The other rank, once all is done.
    pub(super) done: Option<usize>,
    /// A receive that a message has been found for.
    pub(super) taken: bool,
}

impl<'a> From<P2p<'a>> for Slot<'a> {
    fn from(message: P2p<'a>) -> Self {
        Self { message, moved: 0, done: None, taken: false }
    }
}

/// Why messages stopped moving.
#[derive(Debug)]
pub(crate) enum Halt {
    Stop(Stop),
    /// A message does not fit its receiver.
    Misfit {
        from: usize,
        what: String,
    },
}

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        Halt::Stop(stop)
    }
}

/// Where what arrives goes.
#[derive(Debug)]
pub(super) enum To {
    /// A receive of those being driven.
    Slot(usize),
    /// Nobody yet.
    Nobody(Vec<u8>),
    /// Nobody yet, and it is too long to be kept: it stays with its sender until a receive is made for it.
    Later,
}

/// The first receive of those being driven that this message fits by source and tag; an error if its type or length differ.
pub(super) fn fitting(slots: &[Slot<'_>], from: usize, header: &MailHeader) -> Result<Option<usize>, Halt> {
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.done.is_none() && !slot.taken) {
        let Way::Receive { from: source, .. } = slot.message.way else { continue };
        if slot.message.tag != header.tag || (source != Source::Any && source != Source::Rank(from)) {
            continue;
        }
        if slot.message.dtype != header.dtype || slot.message.elements() as u64 != header.elements {
            let MailHeader { elements, dtype, tag } = header;
            let what =
                format!("{elements} {dtype} with tag {tag}; try the same length and type on both sides");
            return Err(Halt::Misfit { from, what });
        }
        return Ok(Some(index));
    }
    Ok(None)
}

/// The place for a message among the receives being driven, from now on reserved for it.
pub(super) fn take_slot(
    slots: &mut [Slot<'_>],
    from: usize,
    header: &MailHeader,
) -> Result<Option<To>, Halt> {
    let Some(index) = fitting(slots, from, header)? else { return Ok(None) };
    slots[index].taken = true;
    Ok(Some(To::Slot(index)))
}

pub(super) fn deliver(slot: &mut Slot<'_>, from: usize, data: &[u8]) {
    if let Way::Receive { bytes, .. } = &mut slot.message.way {
        bytes.copy_from_slice(data);
        slot.done = Some(from);
    }
}
