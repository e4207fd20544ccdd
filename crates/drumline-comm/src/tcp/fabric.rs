//! The links of one group, made when first needed. Of two ranks the one with the higher number connects.
//! Not here: moving bytes over them (`drive`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::faults::AppliedFaults;
use super::hub::DialError;
use super::link::Link;
use super::name::{Channel, LinkName};
use super::reconnector::{Links, SharedLinks};
use crate::monitor::GroupState;
use crate::process::Process;
use crate::shm::{Context, Stop};

/// The longest wait before deaths and the deadline are checked again.
pub(super) const NAP: Duration = Duration::from_millis(20);

/// How long the link of a rank that has left may take to arrive.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The links of one rank of one group. Ranks are counted in the group.
#[derive(Debug)]
pub(crate) struct Fabric {
    state: Arc<GroupState>,
    process: Arc<Process>,
    me: usize,
    pub(super) links: SharedLinks,
    /// How long to try before sleeping; 0 when there are more ranks than cores.
    pub(super) spin: Duration,
    applied_faults: AppliedFaults,
    /// A buffer for what is received only to be reduced. It is kept between calls: new memory costs a page fault per 4 KiB.
    scratch: Vec<u64>,
}

impl Fabric {
    pub(crate) fn new(state: Arc<GroupState>, process: Arc<Process>, me: usize, spin: Duration) -> Self {
        let links = SharedLinks::default();
        Self {
            state,
            process,
            me,
            links,
            spin,
            applied_faults: AppliedFaults::default(),
            scratch: Vec::new(),
        }
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

    /// Injected faults: breaks the connections that are to be broken.
    pub(super) fn apply_faults(&mut self) {
        for rank in self.applied_faults.catch_up(&self.process.link_faults) {
            let mut links = self.links.lock();
            let peer = self.state.members.iter().position(|member| *member == rank);
            if let Some(link) = peer.and_then(|peer| links.get_mut(&peer)) {
                tracing::warn!(group = %self.state.group, "fault: the connection to rank {rank} is broken");
                link.break_connection();
            }
        }
    }

    /// Injected faults: waits as long as data for this peer is delayed.
    pub(super) fn delay(&self, peer: usize) {
        self.applied_faults.delay(self.state.members[peer]);
    }

    /// Makes the link to `peer`, and meanwhile checks the other `links`.
    pub(super) fn open(&self, cx: &Context<'_>, links: &mut Links, peer: usize) -> Result<Link, Stop> {
        let begin = Instant::now();
        let hub = self.process.hub().map_err(|error| Stop::link(peer, &error))?;
        self.process.maintain(&self.links).map_err(|error| Stop::link(peer, &error))?;
        let connects = self.me > peer;
        let (from, to) = if connects { (self.me, peer) } else { (peer, self.me) };
        let group = self.state.group.to_string();
        let members = &self.state.members;
        let channel = Channel::Data;
        let name = LinkName { group, channel, from: members[from], to: members[to] };
        let mut last_error = String::new();
        let mut left_since = None;
        loop {
            if connects {
                let deadline = begin + cx.watch.timeout;
                let address = self.process.hub_address(members[peer], deadline);
                let address = address.map_err(|error| DialError::Failed(error.to_string()));
                match address.and_then(|address| Link::dialled(hub, address, &name, deadline)) {
                    Ok(link) => return Ok(link),
                    Err(DialError::Refused(reason)) => return Err(Stop::link(peer, &reason)),
                    Err(DialError::Failed(error)) => last_error = error,
                }
                std::thread::sleep(NAP);
            } else if let Some(link) = Link::arrived(hub, &name) {
                return Ok(link);
            } else {
                hub.wait_for(&name, NAP);
            }
            match cx.watch.check(begin, Some(peer), &|| false) {
                Err(Stop::TimedOut) if connects => return Err(Stop::link(peer, &last_error)),
                // The link that it made before it left may still be on its way through the hub.
                Err(Stop::Left(_))
                    if !connects && left_since.get_or_insert_with(Instant::now).elapsed() < GRACE => {}
                other => other?,
            }
            self.maintain_links(cx, links, &[])?;
        }
    }

    /// Checks the links, and reconnects those that are broken. An error if one cannot be reconnected; but a link that the
    /// other side has refused matters only if it is `needed`.
    pub(super) fn maintain_links(
        &self,
        cx: &Context<'_>,
        links: &mut Links,
        needed: &[usize],
    ) -> Result<(), Stop> {
        let Ok(hub) = self.process.hub() else { return Ok(()) };
        for (&peer, link) in links {
            let (outcome, is_needed) = (link.maintain(hub), needed.contains(&peer));
            let has_left = link.is_broken() && cx.watch.has_left(peer);
            match outcome.err().and_then(|error| error.cause(is_needed)) {
                _ if has_left && is_needed => return Err(Stop::Left(peer)),
                Some(cause) if !has_left => return Err(Stop::Link { peer, cause }),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The error for a link that ended although its rank is not known to have ended.
pub(crate) const CLOSED: &str = "the other side closed it; try looking at what that rank wrote last";

impl Drop for Fabric {
    fn drop(&mut self) {
        // If the group was given up, the others must learn the cause, not only that this rank has left.
        if !self.state.given_up.load(Ordering::Acquire) && !std::thread::panicking() {
            self.links.say_goodbye();
        }
    }
}
