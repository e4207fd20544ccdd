//! The post office of a rank: finds the receiver of what arrives, keeps what nobody waits for yet, and moves bytes.
//!
//! ```text
//!   slots to send ──▶ one stream to each rank, a message at a time
//!   one stream from each rank ──▶ header ──▶ the first fitting receive, or kept in `waiting`
//! ```
//! Nothing moves by itself: whoever waits for a message drives all of its own. While it waits for room to send it also
//! takes in what arrives, so two ranks that send to each other first and receive afterwards do not block each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::slot::{Halt, Slot, To, deliver, fitting, take_slot};
use super::streams::{Carrier, Streams};
use super::{P2p, Way};
use crate::error::CommError;
use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{KnownSites, Node, Stop, Watch};
use crate::tcp::frame::{GOODBYE, HEADER, MAX_UNEXPECTED, MailHeader};

#[derive(Debug)]
pub(crate) struct PostOffice<C = Streams> {
    pub(super) streams: C,
    pub(super) me: usize,
    pub(super) arriving: Vec<Arriving>,
    /// Complete messages that nobody has asked for, in the order of arrival.
    pub(super) waiting: VecDeque<Kept>,
    /// The scope that has messages under way.
    owner: Option<usize>,
    /// The calls that send or receive messages so far.
    pub(super) num_calls: u64,
    pub(super) known_sites: KnownSites,
    /// The most that is taken in from one rank before the receives are made.
    pub(super) most_unexpected: u64,
}

#[derive(Debug)]
pub(super) struct Kept {
    from: usize,
    header: MailHeader,
    data: Vec<u8>,
}

/// What has come from one rank of the message it is sending.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    header: [u8; HEADER],
    got: usize,
    pub(super) letter: Option<(MailHeader, To)>,
    /// Memory its messages that nobody has asked for take.
    pub(super) kept: u64,
}

/// What a turn has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Moved {
    Nothing,
    /// Something that this call does not wait for.
    Beside,
    /// A message of this call.
    Ours,
}

impl Kept {
    /// The memory it takes. An empty message, too, takes some.
    fn size(&self) -> u64 {
        (size_of::<Self>() + self.data.len()) as u64
    }
}

impl PostOffice {
    pub(crate) fn new(
        process: &Arc<Process>,
        fate: &Arc<Fate>,
        me: usize,
        local: &[usize],
        node: Option<&Node>,
    ) -> Self {
        let streams = Streams::new(process.clone(), fate, me, local, node.map(Node::mail));
        Self::over(streams, me, fate.members.len())
    }
}

impl<C: Carrier> PostOffice<C> {
    /// The post office of rank `me` of `ranks`, with these streams.
    pub(super) fn over(streams: C, me: usize, ranks: usize) -> Self {
        let arriving = (0..ranks).map(|_| Arriving::default()).collect();
        Self {
            streams,
            me,
            arriving,
            waiting: VecDeque::new(),
            owner: None,
            num_calls: 0,
            known_sites: KnownSites::default(),
            most_unexpected: MAX_UNEXPECTED,
        }
    }

    /// An error if another scope than `owner` has messages under way: what arrives might be meant for those.
    #[track_caller]
    pub(super) fn check_free_for(&self, owner: Option<usize>) -> Result<(), CommError> {
        if self.owner.is_none() || self.owner == owner {
            return Ok(());
        }
        Err(CommError::invalid(
            "a scope has messages under way on this group; try that scope's isend and irecv, or end the scope first",
        ))
    }

    /// Notes that the scope `owner` has messages under way, or no longer has.
    pub(super) fn claim(&mut self, owner: usize, open: bool) {
        if open {
            self.owner = Some(owner);
        } else if self.owner == Some(owner) {
            self.owner = None;
        }
    }

    /// Bytes of messages that nobody has asked for.
    #[cfg(fuzzing)]
    pub(super) fn num_kept(&self) -> usize {
        self.waiting.iter().map(|kept| kept.data.len()).sum()
    }

    /// Moves messages until it is `enough`. The deadline is counted from when a message of this call last moved: what comes
    /// for others does not put it off.
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
                Moved::Beside => watch.check(begin, None, &|| false),
                Moved::Ours => {
                    begin = Instant::now();
                    Ok(())
                }
            };
            match outcome {
                Err(Stop::TimedOut) => return Err(self.blockade(slots).unwrap_or(Stop::TimedOut.into())),
                // What moves in a group that was given up may be the last that was under way.
                Err(Stop::GivenUp) if moved == Moved::Beside => {}
                other => other?,
            }
        }
    }

    /// Waits a moment for something to move; an error if it never will.
    fn wait(&mut self, slots: &[Slot<'_>], watch: &Watch<'_>, begin: Instant) -> Result<(), Stop> {
        if let Some(stop) = self.absent(slots, watch) {
            return Err(stop);
        }
        let (mut senders, receivers) = self.awaited(slots);
        senders.retain(|&rank| !self.is_held_up(rank));
        self.streams.wait(watch, begin, &senders, &receivers)
    }

    /// Gives messages that came early to receives that were made since.
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

    /// Keeps a message until its receive is made, which may have been done while it arrived.
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
            let Way::Send { to, bytes } = slot.message.way else { continue };
            // One message at a time to each rank, in the order they were begun.
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

    /// Writes as much of a message as its stream takes.
    fn push(&mut self, slot: &mut Slot<'_>, watch: &Watch<'_>) -> Result<(), Halt> {
        let Way::Send { to, bytes } = slot.message.way else { return Ok(()) };
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

    /// One read of what precedes a message.
    fn receive_header(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<Moved, Halt> {
        let arriving = &mut self.arriving[from];
        let read = self.streams.read(from, &mut arriving.header[arriving.got..])?;
        arriving.got += read;
        if arriving.got < HEADER {
            return Ok(if read > 0 { Moved::Beside } else { Moved::Nothing });
        }
        arriving.got = 0;
        if arriving.header == GOODBYE {
            self.streams.end(from);
            return Ok(Moved::Nothing);
        }
        let header = MailHeader::decode(&arriving.header)
            .map_err(|error| Stop::Link { peer: from, cause: error.to_string() })?;
        let slot = take_slot(slots, from, &header)?;
        let moved = if slot.is_some() { Moved::Ours } else { Moved::Beside };
        let to = slot.unwrap_or_else(|| without_receive(&header, arriving.kept, self.most_unexpected));
        arriving.letter = Some((header, to));
        self.complete(from, slots)?;
        Ok(moved)
    }

    /// One read of a message whose header has come.
    fn receive_data(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<Moved, Halt> {
        let arriving = &mut self.arriving[from];
        let Some((header, to)) = &mut arriving.letter else { return Ok(Moved::Nothing) };
        if let To::Later = to {
            // Its receive may have been made since, or those of what was kept.
            let slot = take_slot(slots, from, header)?;
            *to = slot.unwrap_or_else(|| without_receive(header, arriving.kept, self.most_unexpected));
        }
        let (read, is_ours) = match to {
            To::Slot(index) => {
                let Way::Receive { bytes, .. } = &mut slots[*index].message.way else {
                    unreachable!("only receives are given messages")
                };
                (self.streams.read(from, &mut bytes[arriving.got..])?, true)
            }
            To::Nobody(data) => {
                // Memory grows with what has arrived, not with what was announced.
                let len = (header.bytes() as usize).min(arriving.got + (64 << 10));
                data.resize(len, 0);
                let read = self.streams.read(from, &mut data[arriving.got..])?;
                (read, fitting(slots, from, header)?.is_some())
            }
            To::Later => return Ok(Moved::Nothing),
        };
        arriving.got += read;
        let is_complete = self.complete(from, slots)?;
        Ok(match (read > 0 || is_complete, is_ours) {
            (false, _) => Moved::Nothing,
            (true, false) => Moved::Beside,
            (true, true) => Moved::Ours,
        })
    }

    /// Files the message from `from` if all of it has come; says whether it has.
    fn complete(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<bool, Halt> {
        let arriving = &mut self.arriving[from];
        match &arriving.letter {
            Some((header, To::Slot(_) | To::Nobody(_))) if arriving.got as u64 == header.bytes() => {}
            _ => return Ok(false),
        }
        arriving.got = 0;
        match arriving.letter.take() {
            Some((_, To::Slot(index))) => slots[index].done = Some(from),
            Some((header, To::Nobody(mut data))) => {
                data.truncate(header.bytes() as usize);
                self.keep(Kept { from, header, data }, slots)?;
            }
            Some((_, To::Later)) | None => {}
        }
        Ok(true)
    }
}

fn header_of(message: &P2p<'_>) -> MailHeader {
    MailHeader { dtype: message.dtype, tag: message.tag, elements: message.elements() as u64 }
}

/// Where a message goes that no receive was made for, from a rank of which so much is kept.
fn without_receive(header: &MailHeader, kept: u64, most: u64) -> To {
    if header.bytes().saturating_add(kept) > most { To::Later } else { To::Nobody(Vec::new()) }
}
