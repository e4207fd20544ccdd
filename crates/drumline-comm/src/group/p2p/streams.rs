//! A stream of bytes to and from each rank: a ring for ranks of the same node, a link for the others.
//!
//! A link carries messages one way, from the rank that made it. The receiver finds it among the incoming links.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::monitor::GroupState;
use crate::process::Process;
use crate::shm::{Mail, Stop, Watch};
use crate::tcp::{CLOSED, Channel, DialError, GRACE, Link, LinkName, SharedLinks, UNDER_WAY};

/// How often links are checked while nothing moves.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Streams {
    process: Arc<Process>,
    state: Arc<GroupState>,
    me: usize,
    /// For each rank of the group its index on this node, if it shares memory with this one.
    places: Vec<Option<usize>>,
    mail: Option<Mail>,
    pub(super) out: SharedLinks,
    pub(super) inward: SharedLinks,
    /// When the links were last checked.
    looked: Instant,
    /// Ranks that have sent a goodbye over their link, and when: they send nothing more.
    ended: HashMap<usize, Instant>,
    /// Ranks that have left and whose link has not arrived, and when that was noticed.
    left_since: HashMap<usize, Instant>,
    /// How long nothing has moved in a group that was given up.
    given_up_since: Option<Instant>,
}

/// How bytes get to other ranks and back. Only `wait` blocks.
pub(crate) trait Carrier {
    /// Writes as much as the stream to `to` accepts.
    fn write(&mut self, watch: &Watch<'_>, to: usize, bytes: &[u8]) -> Result<usize, Stop>;

    /// Reads what has arrived from `from`.
    fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Stop>;

    /// `from` has sent a goodbye: nothing more will arrive.
    fn end(&mut self, from: usize);

    /// Why nothing more will arrive from `from`, once that is certain: it has ended, and all it sent has been read.
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
        state: &Arc<GroupState>,
        me: usize,
        local: &[usize],
        mail: Option<Mail>,
    ) -> Self {
        let place = |rank| mail.as_ref().and_then(|_| local.iter().position(|&here| here == rank));
        let places = (0..state.members.len()).map(place).collect();
        Self {
            process,
            state: state.clone(),
            me,
            places,
            mail,
            out: SharedLinks::default(),
            inward: SharedLinks::default(),
            looked: Instant::now(),
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
        let is_new = !self.out.lock().contains_key(&to);
        if is_new {
            // Not under the lock: meanwhile the reconnector may need the other links.
            let link = self.connect(watch, to)?;
            self.out.lock().insert(to, link);
        }
        let mut out = self.out.lock();
        let Some(link) = out.get_mut(&to) else { return Ok(0) };
        let written = link.write(bytes, &[]);
        // The caller may reuse these bytes as soon as its message is complete, so the link copies them now.
        link.keep(&bytes[..written]);
        self.given_up_since = self.given_up_since.filter(|_| written == 0);
        Ok(written)
    }

    fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Stop> {
        if into.is_empty() {
            return Ok(0);
        }
        if let (Some(place), Some(mail)) = (self.places[from], &mut self.mail) {
            return Ok(mail.take(place, into));
        }
        if self.ended.contains_key(&from) {
            return Ok(0);
        }
        let mut inward = self.inward.lock();
        let link = match inward.entry(from) {
            Entry::Occupied(link) => link.into_mut(),
            Entry::Vacant(place) => {
                let Some(link) = self.arrived(from) else { return Ok(0) };
                self.process.maintain(&self.inward).map_err(|error| Stop::link(from, &error))?;
                place.insert(link)
            }
        };
        let read = link.read(into, &mut []).map_err(|bad| Stop::link(from, &bad))?;
        self.given_up_since = self.given_up_since.filter(|_| read == 0);
        Ok(read)
    }

    fn end(&mut self, from: usize) {
        self.ended.entry(from).or_insert_with(Instant::now);
    }

    fn end_of(&mut self, watch: &Watch<'_>, from: usize) -> Option<Stop> {
        // Read before the stream: what the rank sent arrived before it left.
        let has_left = watch.has_left(from);
        if let (Some(place), Some(mail)) = (self.places[from], &self.mail) {
            return (has_left && !mail.can_move(&[place], &[])).then_some(Stop::Left(from));
        }
        if let Some(since) = self.ended.get(&from) {
            // The reason for its end is reported a moment later.
            let closed = || Stop::Link { peer: from, cause: CLOSED.into() };
            return if has_left {
                Some(Stop::Left(from))
            } else {
                (since.elapsed() > UNDER_WAY).then(closed)
            };
        }
        // Events may overtake data: only the end of the link says that nothing more will arrive over it.
        match self.inward.lock().get(&from) {
            _ if !has_left => return None,
            Some(link) => return link.is_broken().then_some(Stop::Left(from)),
            None => {}
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
            // A short wait, so that the caller can check for ranks that left.
            let short = Watch { timeout: Duration::from_millis(20), ..watch.clone() };
            return match mail.wait(&short, &from, &to) {
                Err(Stop::TimedOut) => watch.check(begin, None, &|| false),
                other => other,
            };
        }
        // Between nodes: sleep on the links, but not for long if rings are waited for as well.
        let nap = if from.is_empty() && to.is_empty() { 5_000_000 } else { 200_000 };
        self.doze(senders, receivers, rustix::fs::Timespec { tv_sec: 0, tv_nsec: nap });
        self.maintain_links(watch, receivers)?;
        let may_move = senders.iter().any(|rank| !self.ended.contains_key(rank)) || !receivers.is_empty();
        match watch.check(begin, None, &|| false) {
            // A rank may die after its part is done, while its data and that of others is still on its way.
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
        let (inward, out) = (self.inward.lock(), self.out.lock());
        let open = senders.iter().filter(|rank| !self.ended.contains_key(rank));
        let readable = open.filter_map(|rank| inward.get(rank)).map(|link| (link, PollFlags::IN));
        let writable = receivers.iter().filter_map(|rank| out.get(rank)).map(|link| (link, PollFlags::OUT));
        let links = readable.chain(writable).filter_map(|(link, flags)| Some((link.descriptor()?, flags)));
        let streams: Vec<_> = links.collect();
        let mut fds: Vec<PollFd<'_>> = streams.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
        let _ = rustix::event::poll(&mut fds, Some(&nap));
    }

    /// Checks the links, and reconnects those that are broken. An error if one cannot be reconnected; but a link that the
    /// other side has refused matters only if something is to be sent there.
    fn maintain_links(&mut self, watch: &Watch<'_>, receivers: &[usize]) -> Result<(), Stop> {
        let Ok(hub) = self.process.hub() else { return Ok(()) };
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        let (mut inward, mut out) = (self.inward.lock(), self.out.lock());
        let inward = inward.iter_mut().filter(|(from, _)| !self.ended.contains_key(from));
        let out = out.iter_mut().map(|(to, link)| (to, link, receivers.contains(to)));
        for (&peer, link, is_needed) in inward.map(|(from, link)| (from, link, false)).chain(out) {
            let error = link.maintain(hub).err();
            if let Some(cause) = error.and_then(|error| error.cause(is_needed))
                && (is_needed || !watch.has_left(peer))
            {
                return Err(Stop::Link { peer, cause });
            }
        }
        Ok(())
    }

    fn name(&self, from: usize, to: usize) -> LinkName {
        let (group, members) = (self.state.group.to_string(), &self.state.members);
        LinkName { group, channel: Channel::Mail, from: members[from], to: members[to] }
    }

    /// The link from `from`, if it has arrived.
    fn arrived(&self, from: usize) -> Option<Link> {
        Link::arrived(self.process.hub().ok()?, &self.name(from, self.me))
    }

    fn connect(&self, watch: &Watch<'_>, to: usize) -> Result<Link, Stop> {
        let begin = Instant::now();
        let hub = self.process.hub().map_err(|error| Stop::link(to, &error))?;
        self.process.maintain(&self.out).map_err(|error| Stop::link(to, &error))?;
        let name = self.name(self.me, to);
        loop {
            let deadline = begin + watch.timeout;
            let address = self
                .process
                .hub_address(self.state.members[to], deadline)
                .map_err(|error| DialError::Failed(error.to_string()));
            match address.and_then(|address| Link::dialled(hub, address, &name, deadline)) {
                Ok(link) => return Ok(link),
                Err(DialError::Refused(reason)) => return Err(Stop::link(to, &reason)),
                Err(DialError::Failed(cause)) => match watch.check(begin, Some(to), &|| false) {
                    Err(Stop::TimedOut) => return Err(Stop::link(to, &cause)),
                    other => other?,
                },
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        // A group that was given up may have stopped in the middle of a message.
        if !self.state.given_up.load(Ordering::Acquire) && !std::thread::panicking() {
            self.out.say_goodbye();
        }
    }
}
