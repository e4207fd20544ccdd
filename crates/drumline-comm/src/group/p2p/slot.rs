//! The messages that a call sends or receives, and which receive an arriving message is for.

use super::{Direction, P2p, Source};
use crate::shm::Stop;
use crate::tcp::frame::MailHeader;

/// A message that is being sent or received; see [`Scope::isend`](super::Scope::isend).
#[derive(Debug)]
pub(crate) struct Slot<'a> {
    pub(super) message: P2p<'a>,
    /// Bytes that have moved, the header included.
    pub(super) moved: usize,
    /// The other rank, once the message is complete.
    pub(super) done: Option<usize>,
    /// Whether a message was found for this receive.
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
    /// A message does not have the type or length of its receive.
    BadMessage {
        from: usize,
        what: String,
    },
}

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        Halt::Stop(stop)
    }
}

/// Where an arriving message goes.
#[derive(Debug)]
pub(super) enum Destination {
    /// To a receive of this call.
    Slot(usize),
    /// To memory, until a receive is made for it.
    Kept(Vec<u8>),
    /// It is too long to be kept: it stays with its sender until a receive is made for it.
    Later,
}

/// The first receive of this call that matches the message's source and tag; an error if type or length differ.
pub(super) fn fitting(slots: &[Slot<'_>], from: usize, header: &MailHeader) -> Result<Option<usize>, Halt> {
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.done.is_none() && !slot.taken) {
        let Direction::Receive { from: source, .. } = slot.message.direction else { continue };
        if slot.message.tag != header.tag || (source != Source::Any && source != Source::Rank(from)) {
            continue;
        }
        if slot.message.dtype != header.dtype || slot.message.elements() as u64 != header.elements {
            let MailHeader { elements, dtype, tag } = header;
            let what =
                format!("{elements} {dtype} with tag {tag}; try the same length and type on both sides");
            return Err(Halt::BadMessage { from, what });
        }
        return Ok(Some(index));
    }
    Ok(None)
}

/// Reserves the receive for this message, if there is one.
pub(super) fn take_slot(
    slots: &mut [Slot<'_>],
    from: usize,
    header: &MailHeader,
) -> Result<Option<Destination>, Halt> {
    let Some(index) = fitting(slots, from, header)? else { return Ok(None) };
    slots[index].taken = true;
    Ok(Some(Destination::Slot(index)))
}

pub(super) fn deliver(slot: &mut Slot<'_>, from: usize, data: &[u8]) {
    if let Direction::Receive { bytes, .. } = &mut slot.message.direction {
        bytes.copy_from_slice(data);
        slot.done = Some(from);
    }
}
