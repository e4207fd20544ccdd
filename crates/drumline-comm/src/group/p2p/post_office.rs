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
use std::time::{Duration, Instant};

use super::slot::{Halt, Slot, To, deliver, fitting, take_slot};
use super::streams::{Carrier, Streams};
use super::{Source, Way};
use crate::error::CommError;
use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{KnownSites, Node, Stop, Watch};
use crate::tcp::CLOSED;
use crate::tcp::frame::{HEADER, MAX_UNEXPECTED, MailHeader};

#[derive(Debug)]
pub(crate) struct PostOffice<C = Streams> {
    pub(super) streams: C,
    me: usize,
    arriving: Vec<Arriving>,
    /// Complete messages that nobody has asked for, in the order of arrival.
    pub(super) waiting: VecDeque<Kept>,
    /// The scope that has messages under way.
    owner: Option<usize>,
    /// The calls that send or receive messages so far.
    pub(super) num_calls: u64,
    pub(super) known_sites: KnownSites,
    /// The longest message that is taken in before its receive is made.
    pub(super) most_unexpected: u64,
}

/// How long the last words of a rank that has left may take.
const UNDER_WAY: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(super) struct Kept {
    from: usize,
    header: MailHeader,
    data: Vec<u8>,
}

/// What has come from one rank of the message it is sending.
#[derive(Debug, Default)]
struct Arriving {
    header: [u8; HEADER],
    got: usize,
    letter: Option<(MailHeader, To)>,
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

    /// Moves messages until it is `enough`.
    pub(super) fn drive(
        &mut self,
        slots: &mut [Slot<'_>],
        watch: &Watch<'_>,
        enough: impl Fn(&[Slot<'_>]) -> bool,
    ) -> Result<(), Halt> {
        self.hand_out_waiting(slots)?;
        let mut begin = Instant::now();
        let mut left_since = None;
        loop {
            let moved = self.send_some(slots, watch)? | self.receive_some(slots)?;
            if enough(slots) {
                return Ok(());
            }
            if moved {
                (begin, left_since) = (Instant::now(), None);
                continue;
            }
            if let Some(stop) = self.absent(slots, watch)
                && left_since.get_or_insert_with(Instant::now).elapsed() > UNDER_WAY
            {
                return Err(stop.into());
            }
            let (mut senders, receivers) = self.awaited(slots);
            senders.retain(|&rank| !self.is_held_up(rank));
            match self.streams.wait(watch, begin, &senders, &receivers) {
                Err(Stop::TimedOut) => return Err(self.blockade().unwrap_or(Stop::TimedOut.into())),
                other => other?,
            }
        }
    }

    /// Gives messages that came early to receives that were made since.
    fn hand_out_waiting(&mut self, slots: &mut [Slot<'_>]) -> Result<(), Halt> {
        let mut index = 0;
        while index < self.waiting.len() {
            let Kept { from, header, .. } = &self.waiting[index];
            match fitting(slots, *from, header)? {
                Some(slot) => {
                    let kept = self.waiting.remove(index).expect("index is in range");
                    deliver(&mut slots[slot], kept.from, &kept.data);
                }
                None => index += 1,
            }
        }
        Ok(())
    }

    fn send_some(&mut self, slots: &mut [Slot<'_>], watch: &Watch<'_>) -> Result<bool, Halt> {
        let mut moved = false;
        let mut busy = Vec::new();
        for index in 0..slots.len() {
            let slot = &slots[index];
            let Way::Send { to, bytes } = slot.message.way else { continue };
            // One message at a time to each rank, in the order they were begun.
            if slot.done.is_some() || busy.contains(&to) {
                continue;
            }
            let header = MailHeader {
                dtype: slot.message.dtype,
                tag: slot.message.tag,
                elements: slot.message.elements() as u64,
            };
            if to == self.me {
                self.waiting.push_back(Kept { from: to, header, data: bytes.to_vec() });
                slots[index].done = Some(to);
                self.hand_out_waiting(slots)?;
                moved = true;
                continue;
            }
            let encoded = header.encode();
            let before = slots[index].moved;
            let mut at = before;
            while at < HEADER + bytes.len() {
                let rest = if at < HEADER { &encoded[at..] } else { &bytes[at - HEADER..] };
                match self.streams.write(watch, to, rest)? {
                    0 => break,
                    written => at += written,
                }
            }
            slots[index].moved = at;
            moved |= at > before;
            if at == HEADER + bytes.len() {
                slots[index].done = Some(to);
            } else {
                busy.push(to);
            }
        }
        Ok(moved)
    }

    fn receive_some(&mut self, slots: &mut [Slot<'_>]) -> Result<bool, Halt> {
        let mut moved = false;
        for from in self.awaited(slots).0 {
            while self.receive_from(from, slots)? {
                moved = true;
            }
        }
        Ok(moved)
    }

    /// One read from one rank; says whether anything came.
    fn receive_from(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<bool, Halt> {
        let arriving = &mut self.arriving[from];
        let Some((header, to)) = &mut arriving.letter else {
            let read = self.streams.read(from, &mut arriving.header[arriving.got..], arriving.got > 0)?;
            arriving.got += read;
            if arriving.got == HEADER {
                arriving.got = 0;
                let header = MailHeader::decode(&arriving.header)
                    .map_err(|error| Stop::Link { peer: from, cause: error.to_string() })?;
                let to = match take_slot(slots, from, &header)? {
                    None if header.bytes() > self.most_unexpected => To::Later,
                    None => To::Nobody(Vec::new()),
                    Some(slot) => slot,
                };
                arriving.letter = Some((header, to));
                self.complete(from, slots)?;
            }
            return Ok(read > 0);
        };
        if let To::Later = to {
            // Its receive may have been made since.
            let Some(slot) = take_slot(slots, from, header)? else { return Ok(false) };
            *to = slot;
        }
        let total = header.bytes() as usize;
        let read = match to {
            To::Slot(index) => {
                let Way::Receive { bytes, .. } = &mut slots[*index].message.way else {
                    unreachable!("only receives are given messages")
                };
                self.streams.read(from, &mut bytes[arriving.got..], true)?
            }
            To::Nobody(data) => {
                // Memory grows with what has arrived, not with what was announced.
                let len = total.min(arriving.got + (64 << 10));
                data.resize(len, 0);
                self.streams.read(from, &mut data[arriving.got..], true)?
            }
            To::Later => 0,
        };
        arriving.got += read;
        self.complete(from, slots)?;
        Ok(read > 0)
    }

    /// Files the message from `from` if all of it has come.
    fn complete(&mut self, from: usize, slots: &mut [Slot<'_>]) -> Result<(), Halt> {
        let arriving = &mut self.arriving[from];
        if !matches!(&arriving.letter, Some((header, _)) if arriving.got as u64 == header.bytes()) {
            return Ok(());
        }
        arriving.got = 0;
        match arriving.letter.take() {
            Some((_, To::Slot(index))) => slots[index].done = Some(from),
            Some((header, To::Nobody(mut data))) => {
                data.truncate(header.bytes() as usize);
                self.waiting.push_back(Kept { from, header, data });
                // Its receive may have been made while it arrived.
                self.hand_out_waiting(slots)?;
            }
            Some((_, To::Later)) | None => {}
        }
        Ok(())
    }

    /// Whether nothing more is taken from this rank until the receive for its message is made.
    fn is_held_up(&self, rank: usize) -> bool {
        matches!(self.arriving[rank].letter, Some((_, To::Later)))
    }

    /// When the time is up: the message that kept others of the same rank from coming, if there is one.
    fn blockade(&self) -> Option<Halt> {
        let from = (0..self.arriving.len()).find(|&rank| self.is_held_up(rank))?;
        let (header, _) = self.arriving[from].letter.as_ref()?;
        let MailHeader { tag, elements, dtype } = header;
        let what = format!(
            "{elements} {dtype} with tag {tag}, which are more than is kept for later and hold up what it sends \
             after them; try receiving them first"
        );
        Some(Halt::Misfit { from, what })
    }

    /// Ranks something may come from, and ranks that something waits to go to.
    fn awaited(&self, slots: &[Slot<'_>]) -> (Vec<usize>, Vec<usize>) {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        let everybody = || (0..self.arriving.len()).filter(|&rank| rank != self.me);
        for slot in slots.iter().filter(|slot| slot.done.is_none()) {
            match slot.message.way {
                Way::Send { to, .. } => {
                    receivers.push(to);
                    senders.extend(everybody());
                }
                Way::Receive { from: Source::Any, .. } => senders.extend(everybody()),
                Way::Receive { from: Source::Rank(rank), .. } if rank != self.me => senders.push(rank),
                Way::Receive { .. } => {}
            }
        }
        senders.sort_unstable();
        senders.dedup();
        (senders, receivers)
    }

    /// Why some message will never move, if there is one whose rank is gone. What that sent before may still be under way.
    fn absent(&self, slots: &[Slot<'_>], watch: &Watch<'_>) -> Option<Stop> {
        let left =
            |rank: usize| (watch.has_left(rank) && !self.streams.has_data(rank)).then_some(Stop::Left(rank));
        let closed = |peer: usize| {
            let stop = || Stop::Link { peer, cause: CLOSED.into() };
            self.streams.has_ended(peer).then(stop)
        };
        let silent = |rank: usize| left(rank).or_else(|| closed(rank));
        let others = || (0..watch.left.len()).filter(|&rank| rank != self.me);
        slots.iter().filter(|slot| slot.done.is_none()).find_map(|slot| match slot.message.way {
            Way::Send { to, .. } => left(to),
            Way::Receive { from: Source::Rank(rank), .. } => silent(rank),
            Way::Receive { from: Source::Any, .. } => {
                others().map(silent).collect::<Option<Vec<_>>>()?.into_iter().next()
            }
        })
    }
}
