//! The router of a rank's messages: finds the receive for what arrives, keeps what has no receive yet, and moves bytes.
//!
//! ```text
//!   slots to send ──▶ one stream to each rank, a message at a time
//!   one stream from each rank ──▶ header ──▶ the first fitting receive, or kept in `waiting`
//! ```
//! Nothing moves in the background: a call that waits for a message moves all of its own. While it waits for room to send,
//! it also reads what arrives, so two ranks that both send first and then receive do not block each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::slot::{Destination, Halt, Slot, deliver, fitting, take_slot};
use super::streams::{Carrier, Streams};
use super::{Direction, P2p};
use crate::error::CommError;
use crate::monitor::GroupState;
use crate::process::Process;
use crate::shm::{KnownTexts, Node, Stop, Watch};
use crate::tcp::frame::{GOODBYE, HEADER, MAX_UNEXPECTED, MailHeader};

#[derive(Debug)]
pub(crate) struct Router<C = Streams> {
    pub(super) streams: C,
    pub(super) me: usize,
    pub(super) arriving: Vec<Arriving>,
    /// Complete messages without a receive, in the order of arrival.
    pub(super) waiting: VecDeque<Kept>,
    /// The scope that has open messages.
    owner: Option<usize>,
    /// The number of calls so far that send or receive messages.
    pub(super) num_calls: u64,
    pub(super) known_texts: KnownTexts,
    /// The most bytes that are read from one rank before their receives are made.
    pub(super) most_unexpected: u64,
}

#[derive(Debug)]
pub(super) struct Kept {
    from: usize,
    header: MailHeader,
    data: Vec<u8>,
}

/// What has arrived of the message that one rank is sending.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    header: [u8; HEADER],
    got: usize,
    pub(super) letter: Option<(MailHeader, Destination)>,
    /// The memory that its messages without a receive take.
    pub(super) kept: u64,
}

/// What one pass has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moved {
    Nothing,
    /// Something that this call does not wait for.
    Other,
    /// A message of this call.
    Ours,
}

impl Kept {
    /// The memory that it takes. An empty message takes some, too.
    fn size(&self) -> u64 {
        (size_of::<Self>() + self.data.len()) as u64
    }
}

impl Router {
    pub(crate) fn new(
        process: &Arc<Process>,
        state: &Arc<GroupState>,
        me: usize,
        local: &[usize],
        node: Option<&Node>,
    ) -> Self {
        let streams = Streams::new(process.clone(), state, me, local, node.map(Node::mail));
        Self::over(streams, me, state.members.len())
    }
}

impl<C: Carrier> Router<C> {
    /// The router of rank `me` of `ranks`, over these streams.
    pub(super) fn over(streams: C, me: usize, ranks: usize) -> Self {
        let arriving = (0..ranks).map(|_| Arriving::default()).collect();
        Self {
            streams,
            me,
            arriving,
            waiting: VecDeque::new(),
            owner: None,
            num_calls: 0,
            known_texts: KnownTexts::default(),
            most_unexpected: MAX_UNEXPECTED,
        }
    }

    /// An error if another scope than `owner` has open messages: what arrives might be for those.
    #[track_caller]
    pub(super) fn check_free_for(&self, owner: Option<usize>) -> Result<(), CommError> {
        if self.owner.is_none() || self.owner == owner {
            return Ok(());
        }
        Err(CommError::invalid(
            "a scope has open messages on this group; try that scope's isend and irecv, or end the scope first",
        ))
    }

    /// Records whether the scope `owner` has open messages.
    pub(super) fn claim(&mut self, owner: usize, open: bool) {
        if open {
            self.owner = Some(owner);
        } else if self.owner == Some(owner) {
            self.owner = None;
        }
    }

    /// Bytes of messages without a receive.
    #[cfg(fuzzing)]
    pub(super) fn num_kept(&self) -> usize {
        self.waiting.iter().map(|kept| kept.data.len()).sum()
    }

    /// Moves messages until `enough` returns true. The deadline counts from when a message of this call last moved: messages of
    /// other calls do not extend it.
    pub(super) fn drive(
        &mut self,
        slots: &mut [Slot<'_>],
        watch: &Watch<'_>,
        enough: impl Fn(&[Slot<'_>]) -> bool,
    ) -> Result<(), Halt> {
        self.hand_out_waiting(slots)?;
        let mut begin = Instant::now();
        loop {
            let moved = self.send_some(slots, watch)?.max(self.receive_some(slots)?);
            if enough(slots) {
                return Ok(());
            }
            let outcome = match moved {
                Moved::Nothing => self.wait(slots, watch, begin),
                Moved::Other => watch.check(begin, None, &|| false),
                Moved::Ours => {
                    begin = Instant::now();
                    Ok(())
                }
            };
            match outcome {
                Err(Stop::TimedOut) => return Err(self.blockade(slots).unwrap_or(Stop::TimedOut.into())),
                // What still moves in a group that was given up may be the end of a message.
                Err(Stop::GivenUp) if moved == Moved::Other => {}
                other => other?,
            }
        }
    }

    /// Waits a moment for something to move; an error if nothing ever will.
    fn wait(&mut self, slots: &[Slot<'_>], watch: &Watch<'_>, begin: Instant) -> Result<(), Stop> {
        if let Some(stop) = self.absent(slots, watch) {
            return Err(stop);
        }
        let (mut senders, receivers) = self.awaited(slots);
        senders.retain(|&rank| !self.is_held_up(rank));
        self.streams.wait(watch, begin, &senders, &receivers)
    }

    /// Gives messages that arrived early to receives that were made since.
    fn hand_out_waiting(&mut self, slots: &mut [Slot<'_>]) -> Result<(), Halt> {
        let mut index = 0;
        while index < self.waiting.len() {
            let Kept { from, header, .. } = &self.waiting[index];
            match fitting(slots, *from, header)? {
                Some(slot) => {
                    let kept = self.waiting.remove(index).expect("index is in range");
                    self.arriving[kept.from].kept -= kept.size();
                    deliver(&mut slots[slot], kept.from, &kept.data);
                }
                None => index += 1,
            }
        }
        Ok(())
    }

    /// Keeps a message until its receive is made, which may have happened while it arrived.
    fn keep(&mut self, kept: Kept, slots: &mut [Slot<'_>]) -> Result<(), Halt> {
        self.arriving[kept.from].kept += kept.size();
        self.waiting.push_back(kept);
        self.hand_out_waiting(slots)
    }

    fn send_some(&mut self, slots: &mut [Slot<'_>], watch: &Watch<'_>) -> Result<Moved, Halt> {
        let mut moved = Moved::Nothing;
        let mut busy = Vec::new();
        for index in 0..slots.len() {
            let slot = &mut slots[index];
            let Direction::Send { to, bytes } = slot.message.direction else { continue };
            // One message at a time to each rank, in the order in which they were started.
            if slot.done.is_some() || busy.contains(&to) {
                continue;
            }
            if to == self.me {
                slot.done = Some(to);
                let header = header_of(&slot.message);
                self.keep(Kept { from: to, header, data: bytes.to_vec() }, slots)?;
                moved = Moved::Ours;
                continue;
            }
            let before = slot.moved;
            self.push(slot, watch)?;
            if slot.moved > before {
                moved = Moved::Ours;
            }
            if slot.done.is_none() {
                busy.push(to);
            }
        }
        Ok(moved)
    }

    /// Writes as much of a message as its stream accepts.
    fn push(&mut self, slot: &mut Slot<'_>, watch: &Watch<'_>) -> Result<(), Halt> {
        let Direction::Send { to, bytes } = slot.message.direction else { return Ok(()) };
        let header = header_of(&slot.message).encode();
        while slot.moved < HEADER + bytes.len() {
            let rest = match slot.moved.checked_sub(HEADER) {
                None => &header[slot.moved..],
                Some(sent) => &bytes[sent..],
            };
            match self.streams.write(watch, to, rest)? {
                0 => return Ok(()),
                written => slot.moved += written,
            }
        }
        slot.done = Some(to);
        Ok(())
    }

    fn receive_some(&mut self, slots: &mut [Slot<'_>]) -> Result<Moved, Halt> {
        let mut most = Moved::Nothing;
        for from in self.awaited(slots).0 {
            loop {
                let moved = match self.arriving[from].letter {
                    None => self.receive_header(from, slots)?,
                    Some(_) => self.receive_data(from, slots)?,
                };
                most = most.max(moved);
                if moved == Moved::Nothing {
                    break;
                }
            }
        }
        Ok(most)
    }

    /// One read of a message's header.
    fn receive_header(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<Moved, Halt> {
        let arriving = &mut self.arriving[from];
        let read = self.streams.read(from, &mut arriving.header[arriving.got..])?;
        arriving.got += read;
        if arriving.got < HEADER {
            return Ok(if read > 0 { Moved::Other } else { Moved::Nothing });
        }
        arriving.got = 0;
        if arriving.header == GOODBYE {
            self.streams.end(from);
            return Ok(Moved::Nothing);
        }
        let header = MailHeader::decode(&arriving.header).map_err(|error| Stop::link(from, &error))?;
        let slot = take_slot(slots, from, &header)?;
        let moved = if slot.is_some() { Moved::Ours } else { Moved::Other };
        let to = slot.unwrap_or_else(|| without_receive(&header, arriving.kept, self.most_unexpected));
        arriving.letter = Some((header, to));
        self.complete(from, slots)?;
        Ok(moved)
    }

    /// One read of a message whose header has arrived.
    fn receive_data(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<Moved, Halt> {
        let arriving = &mut self.arriving[from];
        let Some((header, to)) = &mut arriving.letter else { return Ok(Moved::Nothing) };
        if let Destination::Later = to {
            // Since then its receive may have been made, or kept messages may have been received.
            let slot = take_slot(slots, from, header)?;
            *to = slot.unwrap_or_else(|| without_receive(header, arriving.kept, self.most_unexpected));
        }
        let (read, is_ours) = match to {
            Destination::Slot(index) => {
                let Direction::Receive { bytes, .. } = &mut slots[*index].message.direction else {
                    unreachable!("only receives get messages")
                };
                (self.streams.read(from, &mut bytes[arriving.got..])?, true)
            }
            Destination::Kept(data) => {
                // Memory grows with what has arrived, not with the announced length.
                let len = (header.bytes() as usize).min(arriving.got + (64 << 10));
                data.resize(len, 0);
                let read = self.streams.read(from, &mut data[arriving.got..])?;
                (read, fitting(slots, from, header)?.is_some())
            }
            Destination::Later => return Ok(Moved::Nothing),
        };
        arriving.got += read;
        let is_complete = self.complete(from, slots)?;
        Ok(match (read > 0 || is_complete, is_ours) {
            (false, _) => Moved::Nothing,
            (true, false) => Moved::Other,
            (true, true) => Moved::Ours,
        })
    }

    /// Delivers or keeps the message from `from` if it is complete; returns whether it is.
    fn complete(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<bool, Halt> {
        let arriving = &mut self.arriving[from];
        match &arriving.letter {
            Some((header, Destination::Slot(_) | Destination::Kept(_)))
                if arriving.got as u64 == header.bytes() => {}
            _ => return Ok(false),
        }
        arriving.got = 0;
        match arriving.letter.take() {
            Some((_, Destination::Slot(index))) => slots[index].done = Some(from),
            Some((header, Destination::Kept(mut data))) => {
                data.truncate(header.bytes() as usize);
                self.keep(Kept { from, header, data }, slots)?;
            }
            Some((_, Destination::Later)) | None => {}
        }
        Ok(true)
    }
}

fn header_of(message: &P2p<'_>) -> MailHeader {
    MailHeader { dtype: message.dtype, tag: message.tag, elements: message.elements() as u64 }
}

/// Where a message without a receive goes; `kept` is the memory that its rank's messages take already.
fn without_receive(header: &MailHeader, kept: u64, most: u64) -> Destination {
    if header.bytes().saturating_add(kept) > most {
        Destination::Later
    } else {
        Destination::Kept(Vec::new())
    }
}
