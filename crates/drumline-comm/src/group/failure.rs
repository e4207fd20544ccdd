//! When a call stops: find out who and why, tell the others, and give the group up.

use std::time::{Duration, Instant};

use super::ProcessGroup;
use super::tiers::Tiers;
use crate::call::{Call, Trace};
use crate::error::{CommError, Silence};
use crate::shm::{Context, Stop};

/// How long others may take to say what they do, and bad news to arrive.
const NEWS_WAIT: Duration = Duration::from_millis(400);

impl ProcessGroup {
    /// The error for a stop; the group is given up with it, and the other ranks are told.
    #[cold]
    pub(super) fn failed(&self, tiers: &Tiers, cx: &Context<'_>, call: &Call, stop: Stop) -> CommError {
        let trace = call.trace(cx.sequence);
        let fate = &self.inner.fate;
        let cause = match stop {
            Stop::GivenUp => return self.cause_or(CommError::Store { group: self.name().into(), cause: "given up".into() }),
            Stop::Mismatch => {
                self.inner.process.monitor.call_off(fate, &self.mismatch(tiers, &trace));
                self.await_words(tiers);
                self.mismatch(tiers, &trace)
            }
            Stop::TimedOut | Stop::Silent(_) => {
                let missing = match (&tiers.node, &stop) {
                    (_, Stop::Silent(missing)) => missing.clone(),
                    (Some(node), _) => node.missing().into_iter().map(|local| node.members()[local]).collect(),
                    (None, _) => Vec::new(),
                };
                self.inner.process.monitor.call_off(fate, &self.timeout(tiers, cx, &trace, &missing));
                self.await_words(tiers);
                return self.give_up(self.timeout(tiers, cx, &trace, &missing));
            }
            Stop::Left(peer) => {
                CommError::PeerLeft { group: self.name().into(), rank: self.members()[peer], call: trace }
            }
            Stop::Link { peer, cause } => return self.link_failed(cx, &trace, peer, cause),
        };
        self.give_up(cause)
    }

    /// A link may fail because its rank died, which the monitor hears in a moment and knows better.
    fn link_failed(&self, cx: &Context<'_>, trace: &Trace, peer: usize, cause: String) -> CommError {
        let deadline = Instant::now() + NEWS_WAIT;
        while Instant::now() < deadline {
            if let Some(known) = self.inner.fate.cause() {
                return known;
            }
            if cx.watch.left[peer].load(std::sync::atomic::Ordering::Acquire) {
                return self.give_up(CommError::PeerLeft {
                    group: self.name().into(),
                    rank: self.members()[peer],
                    call: trace.clone(),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let rank = self.members()[peer];
        let error = CommError::Link { group: self.name().into(), rank, call: trace.clone(), cause };
        self.inner.process.monitor.call_off(&self.inner.fate, &error);
        self.give_up(error)
    }

    fn give_up(&self, cause: CommError) -> CommError {
        self.inner.fate.give_up(cause.clone());
        cause
    }

    fn cause_or(&self, otherwise: CommError) -> CommError {
        self.inner.fate.cause().unwrap_or(otherwise)
    }

    fn mismatch(&self, tiers: &Tiers, own: &Trace) -> CommError {
        let mut calls = vec![(self.members()[self.rank()], own.clone())];
        for rank in (0..self.size()).filter(|&rank| rank != self.rank()) {
            let trace = self.last_call_of(tiers, rank).unwrap_or_else(|| Trace {
                sequence: own.sequence,
                what: "a call it did not name".into(),
                site: "an unknown place".into(),
            });
            calls.push((self.members()[rank], trace));
        }
        CommError::Mismatch { group: self.name().into(), calls }
    }

    fn timeout(&self, tiers: &Tiers, cx: &Context<'_>, call: &Trace, missing: &[usize]) -> CommError {
        let process = &self.inner.process;
        let silence = |&rank: &usize| {
            let member = self.members()[rank];
            let who = &process.who[member];
            let last_call = self.last_call_of(tiers, rank);
            (member, Silence { host: who.host.clone(), pid: who.pid, last_call, state: process.state_of(member) })
        };
        let missing = missing.iter().map(silence).collect();
        CommError::Timeout { group: self.name().into(), call: call.clone(), after: cx.watch.timeout, missing }
    }

    /// The last call of a rank: read from shared memory, or what it said when the group was called off.
    fn last_call_of(&self, tiers: &Tiers, rank: usize) -> Option<Trace> {
        if let Some(node) = &tiers.node
            && let Some(local) = node.members().iter().position(|&member| member == rank)
        {
            return Some(node.last_call(local));
        }
        self.inner.fate.said(self.members()[rank])
    }

    /// Waits until the ranks of other nodes have said what they do, or have had time to.
    fn await_words(&self, tiers: &Tiers) {
        let deadline = Instant::now() + NEWS_WAIT;
        let others = || (0..self.size()).filter(|&rank| rank != self.rank());
        while Instant::now() < deadline && others().any(|rank| self.last_call_of(tiers, rank).is_none()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
