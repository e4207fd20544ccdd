//! The links of one group, made when first needed: of two ranks the one with the higher number connects.
//! Not here: moving bytes over them (`drive`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::faults::Rehearsed;
use super::hub::Dialled;
use super::link::Link;
use super::mender::{Links, SharedLinks};
use super::name::{Channel, LinkName};
use crate::monitor::Fate;
use crate::process::Process;
use crate::shm::{Context, Stop};

/// Longest wait before looking at death and deadline again.
pub(super) const NAP: Duration = Duration::from_millis(20);

/// How long the link of a rank that has left may take to come in.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The links of one rank of one group. Ranks are counted in the group.
#[derive(Debug)]
pub(crate) struct Fabric {
    fate: Arc<Fate>,
    process: Arc<Process>,
    me: usize,
    pub(super) links: SharedLinks,
    /// Tries before sleeping; none when ranks outnumber cores.
    pub(super) spins: u32,
    rehearsed: Rehearsed,
    /// Room for what is received only to be reduced, kept from call to call: new memory costs a page fault each 4 KiB.
    scratch: Vec<u64>,
}

impl Fabric {
    pub(crate) fn new(fate: Arc<Fate>, process: Arc<Process>, me: usize, spins: u32) -> Self {
        let (links, rehearsed, scratch) = (SharedLinks::default(), Rehearsed::default(), Vec::new());
        Self { fate, process, me, links, spins, rehearsed, scratch }
    }

    pub(crate) fn me(&self) -> usize {
        self.me
    }

    pub(super) fn take_scratch(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.scratch)
    }

    pub(super) fn keep_scratch(&mut self, scratch: Vec<u64>) {
        self.scratch = scratch;
    }

    /// Faults on purpose: breaks the connections that are to be broken.
    pub(super) fn rehearse(&mut self) {
        for rank in self.rehearsed.catch_up(&self.process.link_faults) {
            let mut links = self.links.lock();
            let peer = self.fate.members.iter().position(|member| *member == rank);
            if let Some(link) = peer.and_then(|peer| links.get_mut(&peer)) {
                tracing::warn!(group = %self.fate.group, "fault: the connection to rank {rank} is broken");
                link.break_connection();
            }
        }
    }

    /// Faults on purpose: waits as long as data for this peer is held back.
    pub(super) fn hold_back(&self, peer: usize) {
        self.rehearsed.hold_back(self.fate.members[peer]);
    }

    /// Makes the link to `peer`, and looks after the other `links` meanwhile.
    pub(super) fn open(&self, cx: &Context<'_>, links: &mut Links, peer: usize) -> Result<Link, Stop> {
        let begin = Instant::now();
        let link = |cause: String| Stop::Link { peer, cause };
        let hub = self.process.hub().map_err(link)?;
        self.process.look_after(&self.links).map_err(link)?;
        let connects = self.me > peer;
        let (from, to) = if connects { (self.me, peer) } else { (peer, self.me) };
        let (group, members, channel) = (self.fate.group.to_string(), &self.fate.members, Channel::Data);
        let name = LinkName { group, channel, from: members[from], to: members[to] };
        let mut last_error = String::new();
        let mut left_since = None;
        loop {
            if connects {
                let deadline = begin + cx.watch.timeout;
                let address = self.process.hub_address(members[peer], deadline).map_err(Dialled::Failed);
                match address.and_then(|address| Link::dialled(hub, address, &name, deadline)) {
                    Ok(link) => return Ok(link),
                    Err(Dialled::Refused(reason)) => return Err(link(reason)),
                    Err(Dialled::Failed(error)) => last_error = error,
                }
                std::thread::sleep(NAP);
            } else if let Some(link) = Link::arrived(hub, &name) {
                return Ok(link);
            } else {
                hub.wait_for(&name, NAP);
            }
            match cx.watch.check(begin, Some(peer), &|| false) {
                Err(Stop::TimedOut) if connects => return Err(link(last_error)),
                // What it sent before it left may still be on its way through the hub.
                Err(Stop::Left(_))
                    if !connects && left_since.get_or_insert_with(Instant::now).elapsed() < GRACE => {}
                other => other?,
            }
            self.look_after_links(cx, links, &[])?;
        }
    }

    /// Sees to links that are broken, or may be without anybody noticing. An error if one cannot be mended, except that
    /// another side that wants it no more is of no concern unless the link is `needed`.
    pub(super) fn look_after_links(
        &self,
        cx: &Context<'_>,
        links: &mut Links,
        needed: &[usize],
    ) -> Result<(), Stop> {
        let Ok(hub) = self.process.hub() else { return Ok(()) };
        for (&peer, link) in links {
            let (outcome, is_needed) = (link.look_after(hub), needed.contains(&peer));
            let has_left = link.is_broken() && cx.watch.has_left(peer);
            match outcome.err().and_then(|unmended| unmended.cause(is_needed)) {
                _ if has_left && is_needed => return Err(Stop::Left(peer)),
                Some(cause) if !has_left => return Err(Stop::Link { peer, cause }),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Of a link that ended while its process was not known to.
pub(crate) const CLOSED: &str = "the other side closed it; try looking at what that rank wrote last";

impl Drop for Fabric {
    fn drop(&mut self) {
        // The others are to hear why a group was given up, not only that this rank has left it.
        if !self.fate.given_up.load(Ordering::Acquire) && !std::thread::panicking() {
            self.links.say_goodbye();
        }
    }
}
