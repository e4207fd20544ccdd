//! A stream of bytes to and from each rank: a ring for ranks of the same node, a link for the others.
//!
//! A link carries messages one way, from the rank that made it; the receiver finds it among those that came in.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{Mail, Stop, Watch};
use crate::tcp::{CLOSED, Channel, GRACE, LinkName, UNDER_WAY, prepare};

#[derive(Debug)]
pub(crate) struct Streams {
    process: Arc<Process>,
    fate: Arc<Fate>,
    me: usize,
    /// For each rank of the group its place on this node, if it is here and shares memory.
    places: Vec<Option<usize>>,
    mail: Option<Mail>,
    pub(super) out: HashMap<usize, TcpStream>,
    pub(super) inward: HashMap<usize, TcpStream>,
    /// Ranks that have closed their link, and since when: nothing more will come.
    ended: HashMap<usize, Instant>,
    /// Ranks that have left and of which no link has come in, since that was noticed.
    left_since: HashMap<usize, Instant>,
    /// Since when nothing has moved in a group that was given up.
    given_up_since: Option<Instant>,
}

/// How bytes come from other ranks and go to them. None of the calls waits but `wait`.
pub(crate) trait Carrier {
    /// Writes as much as the stream to `to` takes.
    fn write(&mut self, watch: &Watch<'_>, to: usize, bytes: &[u8]) -> Result<usize, Stop>;

    /// Reads what has come from `from`; `due` says that more of a message must come.
    fn read(&mut self, from: usize, into: &mut [u8], due: bool) -> Result<usize, Stop>;

    /// Why nothing more will come from `from`, once that is certain: it is gone, and all it sent has been read.
    fn end_of(&mut self, watch: &Watch<'_>, from: usize) -> Option<Stop>;

    /// Waits until one of `senders` has sent something or one of `receivers` has room, or a moment has passed.
    fn wait(
        &mut self,
        watch: &Watch<'_>,
        begin: Instant,
        senders: &[usize],
        receivers: &[usize],
    ) -> Result<(), Stop>;
}

impl Streams {
    pub(super) fn new(
        process: Arc<Process>,
        fate: &Arc<Fate>,
        me: usize,
        local: &[usize],
        mail: Option<Mail>,
    ) -> Self {
        let place = |rank| mail.as_ref().and_then(|_| local.iter().position(|&here| here == rank));
        let places = (0..fate.members.len()).map(place).collect();
        Self {
            process,
            fate: fate.clone(),
            me,
            places,
            mail,
            out: HashMap::new(),
            inward: HashMap::new(),
            ended: HashMap::new(),
            left_since: HashMap::new(),
            given_up_since: None,
        }
    }
}

impl Carrier for Streams {
    fn write(&mut self, watch: &Watch<'_>, to: usize, bytes: &[u8]) -> Result<usize, Stop> {
        if let (Some(place), Some(mail)) = (self.places[to], &mut self.mail) {
            return Ok(mail.give(place, bytes));
        }
        if !self.out.contains_key(&to) {
            let stream = self.connect(watch, to)?;
            self.out.insert(to, stream);
        }
        let written = settle(to, (&self.out[&to]).write(bytes))?;
        self.given_up_since = self.given_up_since.filter(|_| written == 0);
        Ok(written)
    }

    fn read(&mut self, from: usize, into: &mut [u8], due: bool) -> Result<usize, Stop> {
        if into.is_empty() {
            return Ok(0);
        }
        if let (Some(place), Some(mail)) = (self.places[from], &mut self.mail) {
            return Ok(mail.take(place, into));
        }
        if !self.find(from) {
            return Ok(0);
        }
        let outcome = (&self.inward[&from]).read(into);
        match outcome {
            Ok(0) if due => {
                return Err(Stop::Link { peer: from, cause: "it closed the link inside a message".into() });
            }
            Ok(0) => drop(self.ended.entry(from).or_insert_with(Instant::now)),
            Ok(_) => self.given_up_since = None,
            Err(_) => {}
        }
        settle(from, outcome)
    }

    fn end_of(&mut self, watch: &Watch<'_>, from: usize) -> Option<Stop> {
        // Asked first: what it sent was there before it left.
        let has_left = watch.has_left(from);
        if let (Some(place), Some(mail)) = (self.places[from], &self.mail) {
            return (has_left && !mail.can_move(&[place], &[])).then_some(Stop::Left(from));
        }
        if let Some(since) = self.ended.get(&from) {
            // Why it has ended is heard a moment later.
            let closed = || Stop::Link { peer: from, cause: CLOSED.into() };
            return if has_left {
                Some(Stop::Left(from))
            } else {
                (since.elapsed() > UNDER_WAY).then(closed)
            };
        }
        // News may overtake data: only a link's own end says that nothing more will come over it.
        if !has_left || self.inward.contains_key(&from) {
            return None;
        }
        let since = self.left_since.entry(from).or_insert_with(Instant::now);
        (since.elapsed() > GRACE).then_some(Stop::Left(from))
    }

    fn wait(
        &mut self,
        watch: &Watch<'_>,
        begin: Instant,
        senders: &[usize],
        receivers: &[usize],
    ) -> Result<(), Stop> {
        let local =
            |ranks: &[usize]| -> Vec<usize> { ranks.iter().filter_map(|&rank| self.places[rank]).collect() };
        let (from, to) = (local(senders), local(receivers));
        if let Some(mail) = &self.mail
            && from.len() == senders.len()
            && to.len() == receivers.len()
        {
            // Cut short, so that the caller can look at ranks that left.
            let short = Watch { timeout: Duration::from_millis(20), ..watch.clone() };
            return match mail.wait(&short, &from, &to) {
                Err(Stop::TimedOut) => watch.check(begin, None, &|| false),
                other => other,
            };
        }
        // Between nodes: sleep on the links, but not for long if rings are waited for as well.
        let nap = if from.is_empty() && to.is_empty() { 5_000_000 } else { 200_000 };
        self.doze(senders, receivers, rustix::fs::Timespec { tv_sec: 0, tv_nsec: nap });
        let may_move = senders.iter().any(|rank| !self.ended.contains_key(rank)) || !receivers.is_empty();
        match watch.check(begin, None, &|| false) {
            // A rank may die when it has done its part, and what it and the others sent is on its way.
            Err(Stop::GivenUp)
                if may_move && self.given_up_since.get_or_insert_with(Instant::now).elapsed() < UNDER_WAY =>
            {
                Ok(())
            }
            other => other,
        }
    }
}

impl Streams {
    /// Sleeps until one of these links can move.
    fn doze(&self, senders: &[usize], receivers: &[usize], nap: rustix::fs::Timespec) {
        let open = senders.iter().filter(|rank| !self.ended.contains_key(rank));
        let inward = open.filter_map(|rank| self.inward.get(rank)).map(|stream| (stream, PollFlags::IN));
        let out =
            receivers.iter().filter_map(|rank| self.out.get(rank)).map(|stream| (stream, PollFlags::OUT));
        let streams: Vec<_> = inward.chain(out).map(|(stream, flags)| (stream.as_fd(), flags)).collect();
        let mut fds: Vec<PollFd<'_>> = streams.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
        let _ = rustix::event::poll(&mut fds, Some(&nap));
    }

    fn name(&self, from: usize) -> LinkName {
        LinkName { group: self.fate.group.clone(), channel: Channel::Mail, from }
    }

    /// Whether the link from `from` is there; looks among those that came in.
    fn find(&mut self, from: usize) -> bool {
        if self.inward.contains_key(&from) {
            return true;
        }
        let Ok(hub) = self.process.hub() else { return false };
        let Some(stream) = hub.claim(&self.name(from)) else { return false };
        if prepare(&stream).is_ok() {
            self.inward.insert(from, stream);
        }
        self.inward.contains_key(&from)
    }

    fn connect(&self, watch: &Watch<'_>, to: usize) -> Result<TcpStream, Stop> {
        let begin = Instant::now();
        let link = |cause: String| Stop::Link { peer: to, cause };
        let hub = self.process.hub().map_err(link)?;
        loop {
            let deadline = begin + watch.timeout;
            let address = self.process.hub_address(self.fate.members[to], deadline);
            match address.and_then(|address| hub.connect(address, &self.name(self.me), deadline)) {
                Ok(stream) => {
                    return prepare(&stream).map(|()| stream).map_err(|error| link(error.to_string()));
                }
                Err(cause) => match watch.check(begin, Some(to), &|| false) {
                    Err(Stop::TimedOut) => return Err(link(cause)),
                    other => other?,
                },
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn settle(peer: usize, outcome: std::io::Result<usize>) -> Result<usize, Stop> {
    match outcome {
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(Stop::Link { peer, cause: error.to_string() }),
    }
}
