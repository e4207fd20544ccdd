//! The drive: the loop that moves bytes over several links at once.
//!
//! A **drive** is one step of a collective. Its sends are queued at the start, each with a header. Then the caller receives,
//! piece by piece if it likes, and meanwhile whatever can be sent is sent. So both directions of every link are busy at the
//! same time without a thread for each, and a piece can be reduced while the next one arrives.
//!
//! The data to send belongs to the caller until the step ends, so a link need not copy it in case it must be sent again. It
//! copies only what has not arrived at that time: at the end of the step, when a link breaks, and when the caller pauses.

use std::collections::HashMap;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::fabric::{CLOSED, Fabric, NAP};
use super::frame::{DataHeader, GOODBYE, HEADER};
use super::link::Link;
use super::reconnector::Links;
use super::record::BadRecord;
use crate::shm::{Context, Stop};

/// How long data may be on its way after the group was given up.
pub(crate) const UNDER_WAY: Duration = Duration::from_millis(300);

/// How long nothing may move on a link to a rank that has left: it may never have claimed the link. Longer than TCP needs to
/// send lost packets again.
const UNCLAIMED: Duration = Duration::from_secs(5);

/// Bytes moved in one direction of a link before the other direction's turn. Few enough that the kernel's copy is still in the
/// caches when the peer reads it.
pub(super) const BURST: usize = 256 << 10;

impl Fabric {
    /// Begins one step: `sends` are sent while the caller receives.
    pub(crate) fn drive<'m, 'd>(
        &'m mut self,
        cx: &'m Context<'m>,
        step: u32,
        sends: impl IntoIterator<Item = (usize, &'d [u8])>,
    ) -> Result<Drive<'m, 'd>, Stop> {
        self.apply_faults();
        let links = self.links.lock();
        let mut drive = Drive { fabric: self, links, cx, step, sends: Vec::new(), opened: Vec::new() };
        drive.links.values_mut().for_each(Link::mark);
        for (peer, data) in sends {
            drive.ensure(peer)?;
            drive.fabric.delay(peer);
            let header = drive.header(data.len()).encode();
            drive.sends.push(Sending { peer, header, data, sent: 0, kept: 0 });
        }
        drive.send_some();
        Ok(drive)
    }
}

struct Sending<'d> {
    peer: usize,
    header: [u8; HEADER],
    data: &'d [u8],
    /// Bytes sent, the header included.
    sent: usize,
    /// Of those, the bytes that the link has copied.
    kept: usize,
}

/// One step of a collective.
pub(crate) struct Drive<'m, 'd> {
    fabric: &'m Fabric,
    links: MutexGuard<'m, Links>,
    cx: &'m Context<'m>,
    step: u32,
    sends: Vec<Sending<'d>>,
    /// Peers whose header has arrived.
    opened: Vec<usize>,
}

/// A paused step: its caller does something else, and the links are unlocked.
pub(crate) struct Paused<'m, 'd> {
    fabric: &'m Fabric,
    cx: &'m Context<'m>,
    step: u32,
    sends: Vec<Sending<'d>>,
    opened: Vec<usize>,
}

impl<'m, 'd> Paused<'m, 'd> {
    pub(crate) fn resume(self) -> Drive<'m, 'd> {
        let Self { fabric, cx, step, sends, opened } = self;
        Drive { fabric, links: fabric.links.lock(), cx, step, sends, opened }
    }
}

/// A piece of what a peer sends.
pub(crate) struct Piece<'b> {
    pub(crate) peer: usize,
    /// Length of all data that the peer sends in this step.
    pub(crate) total: usize,
    pub(crate) into: &'b mut [u8],
}

impl<'m, 'd> Drive<'m, 'd> {
    /// Unlocks the links, which copy what was sent.
    pub(crate) fn pause(mut self) -> Paused<'m, 'd> {
        self.keep();
        let Self { fabric, cx, step, sends, opened, .. } = self;
        Paused { fabric, cx, step, sends, opened }
    }
}

impl Drive<'_, '_> {
    fn header(&self, len: usize) -> DataHeader {
        let Context { fingerprint, sequence, .. } = *self.cx;
        DataHeader { step: self.step, sequence, fingerprint, len: len as u64 }
    }

    /// Makes the link to `peer` if there is none.
    fn ensure(&mut self, peer: usize) -> Result<(), Stop> {
        if !self.links.contains_key(&peer) {
            self.keep();
            let link = self.fabric.open(self.cx, &mut self.links, peer)?;
            self.links.insert(peer, link);
        }
        Ok(())
    }

    /// Receives all pieces, at most one from each peer; meanwhile sends.
    pub(crate) fn receive(&mut self, pieces: &mut [Piece<'_>]) -> Result<(), Stop> {
        let mut state: Vec<Receiving> = Vec::with_capacity(pieces.len());
        for piece in pieces.iter() {
            self.ensure(piece.peer)?;
            state.push(Receiving {
                header: [0; HEADER],
                got: if self.opened.contains(&piece.peer) { HEADER } else { 0 },
            });
        }
        let mut idle = Idle::new();
        loop {
            let mut moved = self.send_some();
            let mut done = true;
            for (piece, state) in pieces.iter_mut().zip(&mut state) {
                moved |= self.receive_some(piece, state)?;
                done &= state.got == HEADER + piece.into.len();
            }
            if done {
                return Ok(());
            }
            if moved {
                idle = Idle::new();
                continue;
            }
            let awaited: Vec<usize> = pieces
                .iter()
                .zip(&state)
                .filter(|(piece, state)| state.got < HEADER + piece.into.len())
                .map(|(piece, _)| piece.peer)
                .collect();
            self.wait(&mut idle, &awaited)?;
        }
    }

    /// Sends the rest.
    pub(crate) fn finish(mut self) -> Result<(), Stop> {
        let mut idle = Idle::new();
        while !self.sends.iter().all(Sending::done) || self.links.values().any(Link::has_backlog) {
            if self.send_some() {
                idle = Idle::new();
            } else {
                self.wait(&mut idle, &[])?;
            }
        }
        Ok(())
    }

    fn send_some(&mut self) -> bool {
        let mut moved = false;
        self.links.values_mut().filter(|link| link.has_backlog()).for_each(Link::catch_up);
        for send in self.sends.iter_mut().filter(|send| !send.done()) {
            if let Some(link) = self.links.get_mut(&send.peer) {
                moved |= send.push(link);
            }
        }
        moved
    }

    fn receive_some(&mut self, piece: &mut Piece<'_>, state: &mut Receiving) -> Result<bool, Stop> {
        let peer = piece.peer;
        let before = state.got;
        while state.got < HEADER + piece.into.len() && state.got < before + BURST {
            let in_header = state.got < HEADER;
            let Some(link) = self.links.get_mut(&peer) else { break };
            if state.pull(link, piece.into).map_err(|bad| Stop::link(peer, &bad))? == 0 {
                break;
            }
            if in_header && state.got >= HEADER {
                // What came with the header of another call may be of another type: it must not stay in the buffer.
                self.check(piece, &state.header).inspect_err(|_| piece.into.fill(0))?;
                self.opened.push(peer);
                self.links.get_mut(&peer).into_iter().for_each(Link::acknowledge);
            }
        }
        Ok(state.got > before)
    }

    /// An error unless the header is the one that this rank would send in the peer's place.
    fn check(&self, piece: &Piece<'_>, header: &[u8; HEADER]) -> Result<(), Stop> {
        let peer = piece.peer;
        if *header == GOODBYE {
            return Err(Stop::Link { peer, cause: CLOSED.into() });
        }
        let got = DataHeader::decode(header).map_err(|error| Stop::link(peer, &error))?;
        if got == self.header(piece.total) || cfg!(feature = "unchecked") {
            return Ok(());
        }
        if got.fingerprint != self.cx.fingerprint || got.sequence != self.cx.sequence {
            return Err(Stop::Mismatch(got.sequence.min(self.cx.sequence)));
        }
        let expected = self.header(piece.total);
        Err(Stop::Link { peer, cause: format!("it sent {got:?}, expected {expected:?}") })
    }

    /// Finds a mismatch between two ranks that both only send, in different calls: neither would read the other's header.
    fn look_for_other_calls(&mut self) -> Result<(), Stop> {
        for send in self.sends.iter().filter(|send| !send.done()) {
            let header = self.links.get_mut(&send.peer).and_then(Link::peek);
            let Some(header) = header else { continue };
            if let Ok(DataHeader { sequence, fingerprint, .. }) = DataHeader::decode(&header)
                && sequence == self.cx.sequence
                && fingerprint != self.cx.fingerprint
            {
                return Err(Stop::Mismatch(sequence));
            }
        }
        Ok(())
    }

    /// Spins a little, then sleeps until a link can move.
    fn wait(&mut self, idle: &mut Idle, awaited: &[usize]) -> Result<(), Stop> {
        if idle.begin.elapsed() < self.fabric.spin {
            std::hint::spin_loop();
            return Ok(());
        }
        let mut interest: HashMap<usize, PollFlags> = HashMap::new();
        for &peer in awaited {
            *interest.entry(peer).or_insert(PollFlags::empty()) |= PollFlags::IN;
        }
        for send in self.sends.iter().filter(|send| !send.done()) {
            *interest.entry(send.peer).or_insert(PollFlags::empty()) |= PollFlags::OUT;
        }
        let links = interest.iter().map(|(peer, flags)| (self.links[peer].descriptor(), *flags));
        let fds: Vec<_> = links.filter_map(|(fd, flags)| Some((fd?, flags))).collect();
        let mut fds: Vec<PollFd<'_>> = fds.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
        let nap = rustix::fs::Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as _ };
        let num_links = fds.len();
        let num_ready = rustix::event::poll(&mut fds, Some(&nap));
        if matches!(num_ready, Ok(0)) {
            self.look_for_other_calls()?;
        }
        if matches!(num_ready, Ok(0)) || num_links < interest.len() {
            self.maintain_links(&interest.keys().copied().collect::<Vec<_>>())?;
        }
        // A peer that has left normally may have data on its way; the end of its link says when that is all.
        let absent = interest.keys().find(|&&peer| self.cx.watch.has_left(peer));
        if let Some(&peer) = absent.filter(|_| idle.begin.elapsed() > UNCLAIMED) {
            return Err(Stop::Left(peer));
        }
        match self.cx.watch.check(idle.begin, None, &|| false) {
            Err(Stop::TimedOut) => Err(self.silence(interest.into_keys().collect())),
            // A rank may die after its part is done, while its data and that of others is still on its way.
            Err(Stop::GivenUp)
                if idle.given_up_since.get_or_insert_with(Instant::now).elapsed() < UNDER_WAY =>
            {
                Ok(())
            }
            other => other,
        }
    }
}

impl Drive<'_, '_> {
    /// Checks links that may have broken. What was sent over them is copied first, so that it can be sent again.
    fn maintain_links(&mut self, needed: &[usize]) -> Result<(), Stop> {
        self.keep();
        self.fabric.maintain_links(self.cx, &mut self.links, needed)
    }

    /// Makes the links copy what they have sent.
    fn keep(&mut self) {
        for send in &mut self.sends {
            if let Some(link) = self.links.get_mut(&send.peer) {
                send.keep(link);
            }
        }
    }

    /// The error if nothing has come from these ranks in time.
    fn silence(&self, mut awaited: Vec<usize>) -> Stop {
        if awaited.is_empty() {
            awaited.extend(self.links.iter().filter(|(_, link)| link.has_backlog()).map(|(peer, _)| peer));
        }
        let broken = awaited.iter().find_map(|peer| Some((*peer, self.links.get(peer)?.break_text()?)));
        broken.map_or(Stop::Silent(awaited), |(peer, cause)| Stop::Link { peer, cause })
    }
}

/// How long nothing has moved.
struct Idle {
    begin: Instant,
    given_up_since: Option<Instant>,
}

impl Idle {
    fn new() -> Self {
        Self { begin: Instant::now(), given_up_since: None }
    }
}

struct Receiving {
    header: [u8; HEADER],
    /// Bytes received, the header included.
    got: usize,
}

impl Receiving {
    /// One read: into what is left of the header and of the piece at once.
    fn pull(&mut self, link: &mut Link, into: &mut [u8]) -> Result<usize, BadRecord> {
        let header = self.got.min(HEADER);
        let data = self.got.saturating_sub(HEADER);
        let end = into.len().min(data + BURST);
        let read = link.read(&mut self.header[header..], &mut into[data..end])?;
        self.got += read;
        Ok(read)
    }
}

impl Sending<'_> {
    fn done(&self) -> bool {
        self.sent == HEADER + self.data.len()
    }

    /// Writes a burst, or as much as the link accepts; returns whether that was anything.
    fn push(&mut self, link: &mut Link) -> bool {
        let before = self.sent;
        while !self.done() && self.sent < before + BURST {
            let header = self.sent.min(HEADER);
            let data = self.sent.saturating_sub(HEADER);
            let burst = &self.data[data..self.data.len().min(data + BURST)];
            match link.write(&self.header[header..], burst) {
                0 => break,
                written => self.sent += written,
            }
        }
        link.is_mid_frame = !self.done();
        if self.done() {
            self.keep(link);
        }
        self.sent > before
    }

    /// Makes the link copy what it has sent and has not copied yet.
    fn keep(&mut self, link: &mut Link) {
        let part = |position: usize| (position.min(HEADER), position.saturating_sub(HEADER));
        let ((header, data), (header_end, data_end)) = (part(self.kept), part(self.sent));
        link.keep(&self.header[header..header_end]);
        link.keep(&self.data[data..data_end]);
        self.kept = self.sent;
    }
}
