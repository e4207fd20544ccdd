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

use super::streams::{Carrier, Streams};
use super::{Slot, Source, Way};
use crate::error::CommError;
use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{Node, Stop, Watch};
use crate::tcp::frame::{HEADER, MAX_UNEXPECTED, MailHeader};

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

#[derive(Debug)]
pub(crate) struct PostOffice<C = Streams> {
    streams: C,
    me: usize,
    arriving: Vec<Arriving>,
    /// Complete messages that nobody has asked for, in the order of arrival.
    waiting: VecDeque<Kept>,
    /// The scope that has messages under way.
    owner: Option<usize>,
    calls: u64,
}

/// How long the last words of a rank that has left may take.
const UNDER_WAY: Duration = Duration::from_millis(300);

#[derive(Debug)]
struct Kept {
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

#[derive(Debug)]
enum To {
    /// A receive of those being driven.
    Slot(usize),
    /// Nobody yet.
    Nobody(Vec<u8>),
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
        Self { streams, me, arriving, waiting: VecDeque::new(), owner: None, calls: 0 }
    }

    /// An error if another scope than `owner` has messages under way: what arrives might be meant for those.
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

    pub(super) fn calls(&self) -> u64 {
        self.calls
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
        self.calls += 1;
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
            if let Some(rank) = self.absent(slots, watch)
                && left_since.get_or_insert_with(Instant::now).elapsed() > UNDER_WAY
            {
                return Err(Stop::Left(rank).into());
            }
            let (senders, receivers) = self.awaited(slots);
            self.streams.wait(watch, begin, &senders, &receivers)?;
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
                let to = match fitting(slots, from, &header)? {
                    Some(slot) => {
                        slots[slot].taken = true;
                        To::Slot(slot)
                    }
                    None => To::Nobody(Vec::new()),
                };
                if matches!(to, To::Nobody(_)) && header.bytes() > MAX_UNEXPECTED {
                    let what = format!(
                        "{} bytes that nobody was receiving; try receiving them first",
                        header.bytes()
                    );
                    return Err(Halt::Misfit { from, what });
                }
                arriving.letter = Some((header, to));
                self.complete(from, slots)?;
            }
            return Ok(read > 0);
        };
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
            None => {}
        }
        Ok(())
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

    /// A rank whose leaving means that some message will never move, if there is one. What it sent before may still be
    /// under way.
    fn absent(&self, slots: &[Slot<'_>], watch: &Watch<'_>) -> Option<usize> {
        let left = |rank: usize| watch.left[rank].load(std::sync::atomic::Ordering::Acquire);
        let silent = |rank: usize| left(rank) && !self.streams.has_data(rank);
        let others = || (0..watch.left.len()).filter(|&rank| rank != self.me);
        slots.iter().filter(|slot| slot.done.is_none()).find_map(|slot| match slot.message.way {
            Way::Send { to: rank, .. } | Way::Receive { from: Source::Rank(rank), .. } => {
                silent(rank).then_some(rank)
            }
            Way::Receive { from: Source::Any, .. } => others().next().filter(|_| others().all(silent)),
        })
    }
}

/// The first receive of those being driven that this message fits by source and tag; an error if its type or length differ.
fn fitting(slots: &[Slot<'_>], from: usize, header: &MailHeader) -> Result<Option<usize>, Halt> {
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.done.is_none() && !slot.taken) {
        let Way::Receive { from: source, .. } = slot.message.way else { continue };
        if slot.message.tag != header.tag || (source != Source::Any && source != Source::Rank(from)) {
            continue;
        }
        if slot.message.dtype != header.dtype || slot.message.elements() as u64 != header.elements {
            let what = format!("{} {} with tag {}", header.elements, header.dtype, header.tag);
            return Err(Halt::Misfit { from, what });
        }
        return Ok(Some(index));
    }
    Ok(None)
}

fn deliver(slot: &mut Slot<'_>, from: usize, data: &[u8]) {
    if let Way::Receive { bytes, .. } = &mut slot.message.way {
        bytes.copy_from_slice(data);
        slot.done = Some(from);
    }
}

#[cfg(test)]
mod tests {
    use super::super::P2p;
    use super::super::trickle::Trickle;
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// A message from rank 1 or 2: sender, tag, elements.
    type Sent = (usize, u64, usize);

    fn stream(sent: &[Sent], rank: usize) -> VecDeque<u8> {
        let mut bytes = VecDeque::new();
        for (index, &(from, tag, elements)) in sent.iter().enumerate().filter(|(_, sent)| sent.0 == rank) {
            let header = MailHeader { dtype: crate::DType::U8, tag, elements: elements as u64 };
            debug_assert_eq!(from, rank);
            bytes.extend(header.encode());
            bytes.extend(vec![index as u8; elements]);
        }
        bytes
    }

    proptest! {
        /// However the streams are cut, and in whatever order receives are made, each gets its own message whole.
        #[test]
        fn every_message_finds_its_receive(
            sent in prop::collection::vec((1usize..3, 0u64..3, 0usize..200), 1..12),
            pieces in prop::collection::vec(0usize..90, 0..60),
            order in any::<u64>(),
        ) {
            let mut streams = Trickle::new(3);
            (streams.from[1], streams.from[2]) = (stream(&sent, 1), stream(&sent, 2));
            streams.pieces = pieces.into();
            let mut post = PostOffice::over(streams, 0, 3);
            let (given_up, left) = (AtomicBool::new(false), [const { AtomicBool::new(false) }; 3]);
            let watch = Watch { given_up: &given_up, left: &left, timeout: Duration::from_secs(5) };
            // Receives of one sender and tag in the order sent, all else in any order.
            let mut turns: Vec<usize> = (0..sent.len()).collect();
            turns.sort_by_key(|&index| (sent[index].0 * 3 + sent[index].1 as usize).wrapping_mul(order as usize | 1) % 7);
            for index in turns {
                let (from, tag, elements) = sent[index];
                let mut data = vec![0u8; elements];
                let mut slots = [Slot::from(P2p::recv(&mut data, Source::Rank(from), tag))];
                let outcome = post.drive(&mut slots, &watch, |slots| slots[0].done.is_some());
                prop_assert!(outcome.is_ok(), "{:?}", outcome);
                prop_assert_eq!(slots[0].done, Some(from));
                prop_assert!(data.iter().all(|&byte| byte == index as u8));
            }
            prop_assert!(post.waiting.is_empty());
        }
    }
}
