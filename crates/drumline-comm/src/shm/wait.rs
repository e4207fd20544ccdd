//! Waiting for a peer: spin briefly, then yield the core, then sleep; always checking for deaths and the deadline.
//!
//! Spinning is best when the peer runs on another core at this moment. When there are more ranks than cores, or the
//! scheduler has put two ranks on one core, spinning keeps the peer from running. So spinning is short and followed by
//! yields, which cost little when no other thread wants the core. Only after that does a rank sleep on its bell.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::board::Board;
use super::line::Bell;

/// Why a wait ended without what it waited for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Stop {
    /// The deadline passed.
    TimedOut,
    /// The deadline passed, and nothing came from these ranks of the group.
    Silent(Vec<usize>),
    /// This rank of the group has left normally.
    Left(usize),
    /// The link to this rank of the group failed.
    Link { peer: usize, cause: String },
    /// The group was given up: a peer died, left or reported an error.
    GivenUp,
    /// A peer made another call as its call with this number.
    Mismatch(u64),
    /// Some ranks passed symmetric buffers and some private ones: to be done again as if all were private.
    Mixed,
}

impl Stop {
    /// The link to this rank of the group failed, with this error.
    #[cold]
    pub(crate) fn link(peer: usize, error: &impl ToString) -> Self {
        Self::Link { peer, cause: error.to_string() }
    }
}

/// What every wait of a group checks besides its own condition.
#[derive(Debug, Clone)]
pub(crate) struct Watch<'a> {
    /// Set when the group is given up.
    pub(crate) given_up: &'a AtomicBool,
    /// Set for each rank of the group that is known to have left the job.
    pub(crate) left: &'a [AtomicBool],
    /// Where ranks of this node publish that they have left the group.
    pub(crate) board: Option<&'a Board>,
    /// How long one call may wait.
    pub(crate) timeout: Duration,
}

/// Whether every rank of a node has a core of its own. All ranks of the node must agree on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CoreShare {
    Own,
    /// A round needs the scheduler several times, so fewer and larger rounds are better, and spinning gets in the way.
    Shared,
}

/// How often to try before sleeping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    spins: u32,
    yields: u32,
}

/// The number of first checks without a pause in between.
const CLOSE_LOOKS: u32 = 32;

/// The longest sleep before deaths and the deadline are checked again.
const NAP: Duration = Duration::from_millis(20);

impl Backoff {
    pub(crate) fn new(core_share: CoreShare) -> Self {
        match core_share {
            CoreShare::Own => Self { spins: 400, yields: 400 },
            CoreShare::Shared => Self { spins: 0, yields: 200 },
        }
    }

    /// Returns as soon as `ready` is true, or says why it never will be. `peer` is the rank that it depends on, if it is one.
    #[inline]
    pub(crate) fn wait(
        self,
        bell: &Bell,
        watch: &Watch<'_>,
        peer: Option<usize>,
        ready: impl Fn() -> bool,
    ) -> Result<(), Stop> {
        for spin in 0..self.spins {
            if ready() {
                return Ok(());
            }
            // The first checks follow each other closely, to see a peer that is just arriving at once.
            if spin >= CLOSE_LOOKS {
                std::hint::spin_loop();
            }
        }
        if ready() { Ok(()) } else { self.wait_long(bell, watch, peer, ready) }
    }

    #[cold]
    fn wait_long(
        self,
        bell: &Bell,
        watch: &Watch<'_>,
        peer: Option<usize>,
        ready: impl Fn() -> bool,
    ) -> Result<(), Stop> {
        let begin = Instant::now();
        let mut yields = 0;
        loop {
            if yields < self.yields {
                yields += 1;
                rustix::thread::sched_yield();
            } else {
                bell.doze(&ready, sleep);
            }
            if ready() {
                return Ok(());
            }
            watch.check(begin, peer, &ready)?;
        }
    }
}

impl Watch<'_> {
    /// Whether this rank of the group has left normally.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::Acquire) || self.board.is_some_and(|board| board.has_left(rank))
    }

    /// An error once the group is given up, `peer` has left, or the deadline has passed, unless `ready` has become true
    /// meanwhile.
    pub(crate) fn check(
        &self,
        begin: Instant,
        peer: Option<usize>,
        ready: &impl Fn() -> bool,
    ) -> Result<(), Stop> {
        if cfg!(feature = "unchecked") {
            return Ok(());
        }
        let stop = if self.given_up.load(Ordering::Acquire) {
            Stop::GivenUp
        } else if let Some(peer) = peer.filter(|&peer| self.has_left(peer)) {
            Stop::Left(peer)
        } else if begin.elapsed() > self.timeout {
            Stop::TimedOut
        } else {
            return Ok(());
        };
        if ready() { Ok(()) } else { Err(stop) }
    }
}

#[cfg(not(loom))]
fn sleep(ring: &std::sync::atomic::AtomicU32, value: u32) {
    use rustix::thread::futex;
    let nap = rustix::fs::Timespec { tv_sec: 0, tv_nsec: NAP.as_nanos() as _ };
    // An early return (signal, changed word, end of the nap) is fine: the caller checks again.
    let _ = futex::wait(ring, futex::Flags::empty(), value, Some(&nap));
}

#[cfg(loom)]
fn sleep(_: &loom::sync::atomic::AtomicU32, _: u32) {
    std::thread::sleep(NAP);
}

/// Wakes the owner of `bell` if it sleeps; call after publishing and [`Bell::order`].
#[inline]
pub(crate) fn wake(bell: &Bell) {
    if bell.wanted() {
        bell.strike();
        wake_sleeper(bell);
    }
}

#[cfg(not(loom))]
#[cold]
fn wake_sleeper(bell: &Bell) {
    let _ = rustix::thread::futex::wake(bell.word(), rustix::thread::futex::Flags::empty(), 1);
}

#[cfg(loom)]
fn wake_sleeper(_: &Bell) {}
