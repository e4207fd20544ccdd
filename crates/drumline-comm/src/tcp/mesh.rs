//! The links of one group, made when first needed: of two ranks the one with the higher number connects.
//! Not here: moving bytes over them (`drive`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::hub::Dialled;
use super::link::Link;
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
pub(crate) struct Mesh {
    fate: Arc<Fate>,
    process: Arc<Process>,
    me: usize,
    pub(super) links: HashMap<usize, Link>,
    /// Tries before sleeping; none when ranks outnumber cores.
    pub(super) spins: u32,
    /// Room for what is received only to be reduced, kept from call to call: new memory costs a page fault each 4 KiB.
    scratch: Vec<u64>,
}

impl Mesh {
    pub(crate) fn new(fate: Arc<Fate>, process: Arc<Process>, me: usize, spins: u32) -> Self {
        Self { fate, process, me, links: HashMap::new(), spins, scratch: Vec::new() }
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

    pub(super) fn ensure(&mut self, cx: &Context<'_>, peer: usize) -> Result<(), Stop> {
        if !self.links.contains_key(&peer) {
            let link = self.open(cx, peer)?;
            self.links.insert(peer, link);
        }
        Ok(())
    }

    fn open(&self, cx: &Context<'_>, peer: usize) -> Result<Link, Stop> {
        let begin = Instant::now();
        let link = |cause: String| Stop::Link { peer, cause };
        let hub = self.process.hub().map_err(|error| link(error.to_string()))?;
        let connects = self.me > peer;
        let (from, to) = if connects { (self.me, peer) } else { (peer, self.me) };
        let (group, members, channel) = (self.fate.group.clone(), &self.fate.members, Channel::Data);
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
                hub.wait_for_news(NAP);
            }
            match cx.watch.check(begin, Some(peer), &|| false) {
                Err(Stop::TimedOut) if connects => return Err(link(last_error)),
                // What it sent before it left may still be on its way through the hub.
                Err(Stop::Left(_))
                    if !connects && left_since.get_or_insert_with(Instant::now).elapsed() < GRACE => {}
                other => other?,
            }
        }
    }

    /// Sees to links that are broken, or may be without anybody noticing. An error if one cannot be mended, except that
    /// another side that wants it no more is of no concern unless the link is `needed`.
    pub(super) fn look_after_links(&mut self, cx: &Context<'_>, needed: &[usize]) -> Result<(), Stop> {
        let Ok(hub) = self.process.hub() else { return Ok(()) };
        for (&peer, link) in &mut self.links {
            let (outcome, is_needed) = (link.look_after(hub), needed.contains(&peer));
            if is_needed && link.is_broken() && cx.watch.has_left(peer) {
                return Err(Stop::Left(peer));
            }
            if let Some(cause) = outcome.err().and_then(|unmended| unmended.cause(is_needed)) {
                return Err(Stop::Link { peer, cause });
            }
        }
        Ok(())
    }
}

/// Of a link that ended while its process was not known to.
pub(crate) const CLOSED: &str = "the other side closed it; try looking at what that rank wrote last";

impl Drop for Mesh {
    fn drop(&mut self) {
        // The others are to hear why a group was given up, not only that this rank has left it.
        if !self.fate.given_up.load(Ordering::Acquire) && !std::thread::panicking() {
            self.links.values_mut().for_each(Link::say_goodbye);
        }
    }
}
