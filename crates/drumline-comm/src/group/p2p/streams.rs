//! A stream of bytes to and from each rank: a ring for ranks of the same node, a link for the others.
//!
//! A link carries messages one way, from the rank that made it; the receiver finds it among those that came in.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{Mail, Stop, Watch};
use crate::tcp::{CLOSED, Channel, Dialled, GRACE, Link, LinkName, SharedLinks, UNDER_WAY};

/// How often links are looked after while nothing moves.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Streams {
    process: Arc<Process>,
    fate: Arc<Fate>,
    me: usize,
    /// For each rank of the group its place on this node, if it is here and shares memory.
    places: Vec<Option<usize>>,
    mail: Option<Mail>,
    pub(super) out: SharedLinks,
    pub(super) inward: SharedLinks,
    /// When the links were last looked after.
    looked: Instant,
    /// Ranks that have said goodbye over their link, and since when: nothing more will come.
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

    /// Reads what has come from `from`.
    fn read(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Stop>;

    /// `from` has said goodbye: nothing more will come.
    fn end(&mut self, from: usize);

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
            // Not under the lock: the other links may need the mender meanwhile.
            let link = self.connect(watch, to)?;
            self.out.lock().insert(to, link);
        }
        let mut out = self.out.lock();
        let Some(link) = out.get_mut(&to) else { return Ok(0) };
        let written = link.write(bytes, &[]);
        // What was sent is its owner's again as soon as the message is, which only the caller knows.
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
                self.process.look_after(&self.inward).map_err(|cause| Stop::Link { peer: from, cause })?;
                place.insert(link)
            }
        };
        let read = link.read(into, &mut []).map_err(|cause| Stop::Link { peer: from, cause })?;
        self.given_up_since = self.given_up_since.filter(|_| read == 0);
        Ok(read)
    }

    fn end(&mut self, from: usize) {
        self.ended.entry(from).or_insert_with(Instant::now);
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
        self.look_after_links(watch, receivers)?;
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
        let (inward, out) = (self.inward.lock(), self.out.lock());
        let open = senders.iter().filter(|rank| !self.ended.contains_key(rank));
        let readable = open.filter_map(|rank| inward.get(rank)).map(|link| (link, PollFlags::IN));
        let writable = receivers.iter().filter_map(|rank| out.get(rank)).map(|link| (link, PollFlags::OUT));
        let links = readable.chain(writable).filter_map(|(link, flags)| Some((link.descriptor()?, flags)));
        let streams: Vec<_> = links.collect();
        let mut fds: Vec<PollFd<'_>> = streams.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
        let _ = rustix::event::poll(&mut fds, Some(&nap));
    }

    /// Sees to links that are broken, or may be without anybody noticing. An error if one cannot be mended, except that
    /// another side that wants it no more is of no concern unless something is to be sent there.
    fn look_after_links(&mut self, watch: &Watch<'_>, receivers: &[usize]) -> Result<(), Stop> {
        let Ok(hub) = self.process.hub() else { return Ok(()) };
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        let (mut inward, mut out) = (self.inward.lock(), self.out.lock());
        let inward = inward.iter_mut().filter(|(from, _)| !self.ended.contains_key(from));
        let out = out.iter_mut().map(|(to, link)| (to, link, receivers.contains(to)));
        for (&peer, link, is_needed) in inward.map(|(from, link)| (from, link, false)).chain(out) {
            let unmended = link.look_after(hub).err();
            if let Some(cause) = unmended.and_then(|unmended| unmended.cause(is_needed))
                && (is_needed || !watch.has_left(peer))
            {
                return Err(Stop::Link { peer, cause });
            }
        }
        Ok(())
    }

    fn name(&self, from: usize, to: usize) -> LinkName {
        let (group, members) = (self.fate.group.to_string(), &self.fate.members);
        LinkName { group, channel: Channel::Mail, from: members[from], to: members[to] }
    }

    /// The link from `from`, if it has come in.
    fn arrived(&self, from: usize) -> Option<Link> {
        Link::arrived(self.process.hub().ok()?, &self.name(from, self.me))
    }

    fn connect(&self, watch: &Watch<'_>, to: usize) -> Result<Link, Stop> {
        let begin = Instant::now();
        let link = |cause: String| Stop::Link { peer: to, cause };
        let hub = self.process.hub().map_err(link)?;
        self.process.look_after(&self.out).map_err(link)?;
        let name = self.name(self.me, to);
        loop {
            let deadline = begin + watch.timeout;
            let address = self.process.hub_address(self.fate.members[to], deadline).map_err(Dialled::Failed);
            match address.and_then(|address| Link::dialled(hub, address, &name, deadline)) {
                Ok(link) => return Ok(link),
                Err(Dialled::Refused(reason)) => return Err(link(reason)),
                Err(Dialled::Failed(cause)) => match watch.check(begin, Some(to), &|| false) {
                    Err(Stop::TimedOut) => return Err(link(cause)),
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
        if !self.fate.given_up.load(Ordering::Acquire) && !std::thread::panicking() {
            self.out.say_goodbye();
        }
    }
}
