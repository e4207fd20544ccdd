//! When a call stops: find out who and why, report it to the other ranks, and give the group up.

use std::time::{Duration, Instant};

use super::ProcessGroup;
use super::tiers::Tiers;
use crate::call::{Call, Trace};
use crate::error::{CommError, MissingRank};
use crate::shm::{Context, Stop};

/// How long other ranks may take to report their last calls, and a death to be reported.
const REPORT_WAIT: Duration = Duration::from_millis(800);

impl ProcessGroup {
    /// Gives the group up because of something that went wrong on this rank outside its calls. All later calls, and those that
    /// other ranks are in now, end with an error that names this rank and `cause`. If the group was given up before, the first
    /// cause stays.
    ///
    /// ```
    /// use drumline_comm::{GroupOptions, LocalGroup};
    ///
    /// let outcomes = LocalGroup::outcomes(2, &GroupOptions::default(), |group| match group.rank() {
    ///     0 => group.barrier(), // does not hang
    ///     _ => Err(group.abort("batch 7 cannot be read")),
    /// });
    /// for outcome in outcomes {
    ///     assert!(outcome.unwrap_err().to_string().contains("batch 7 cannot be read"));
    /// }
    /// ```
    #[cold]
    pub fn abort(&self, cause: &str) -> CommError {
        self.status().abort(cause)
    }

    /// The error for the stop of a collective.
    #[cold]
    pub(super) fn failed(&self, tiers: &Tiers, cx: &Context<'_>, call: &Call, stop: Stop) -> CommError {
        let late = tiers.node.as_ref().map_or_else(Vec::new, |node| {
            node.missing().into_iter().map(|place| node.members()[place]).collect()
        });
        self.stopped(cx, call, stop, late)
    }

    /// The error for a stop. The group is given up with it, which is reported to the other ranks. `late` are the ranks of this
    /// node that have not reached this call.
    #[cold]
    pub(super) fn stopped(&self, cx: &Context<'_>, call: &Call, stop: Stop, late: Vec<usize>) -> CommError {
        // The others get the error; this process need not wait for them when it leaves.
        self.inner.process.member.abandon();
        let trace = call.trace(cx.sequence);
        match stop {
            Stop::GivenUp => self.cause_or(CommError::Store {
                group: self.inner.state.group.clone(),
                cause: "the group was given up for a cause that is not known here".into(),
            }),
            Stop::Mismatch(sequence) => self.differ(trace, sequence),
            Stop::Mixed => self.differ(trace, cx.sequence),
            Stop::TimedOut | Stop::Silent(_) => {
                self.collect_last_calls(None);
                let missing = self.missing(cx, stop, late);
                self.call_off(self.timed_out(cx, &trace, &missing))
            }
            Stop::Left(peer) => self.call_off(self.peer_left(trace, peer)),
            Stop::Link { peer, cause } => self.link_failed(cx, trace, peer, cause),
        }
    }

    /// Ranks made different calls as their `sequence`-th.
    fn differ(&self, trace: Trace, sequence: u64) -> CommError {
        // A rank that has not made this call yet may be about to.
        self.collect_last_calls(Some(sequence));
        self.call_off(self.mismatch(trace, sequence))
    }

    /// Messages have waited too long for these ranks.
    #[cold]
    pub(super) fn silent(&self, cx: &Context<'_>, call: &Call, missing: &[usize]) -> CommError {
        self.collect_last_calls(None);
        self.call_off(self.timed_out(cx, &call.trace(cx.sequence), missing))
    }

    /// A link may fail because its rank died. The monitor learns that a moment later and knows more, so its report is waited
    /// for.
    fn link_failed(&self, cx: &Context<'_>, trace: Trace, peer: usize, cause: String) -> CommError {
        let deadline = Instant::now() + REPORT_WAIT;
        while Instant::now() < deadline {
            if let Some(known) = self.inner.state.cause() {
                return known;
            }
            if cx.watch.has_left(peer) {
                return self.call_off(self.peer_left(trace, peer));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let rank = self.members()[peer];
        self.call_off(CommError::Link { group: self.inner.state.group.clone(), rank, call: trace, cause })
    }

    fn peer_left(&self, call: Trace, peer: usize) -> CommError {
        CommError::PeerLeft { group: self.inner.state.group.clone(), rank: self.members()[peer], call }
    }

    /// Gives the group up and reports it, unless it was given up before; returns the cause that counts.
    pub(super) fn call_off(&self, cause: CommError) -> CommError {
        self.status().give_up(cause)
    }

    fn cause_or(&self, otherwise: CommError) -> CommError {
        self.inner.state.cause().unwrap_or(otherwise)
    }

    fn mismatch(&self, own: Trace, sequence: u64) -> CommError {
        let unknown =
            || Trace { sequence, what: "a call it did not report".into(), site: "an unknown place".into() };
        let call = |rank| self.inner.state.last_collective(rank).unwrap_or_else(unknown);
        let theirs = self.others().map(|rank| (self.members()[rank], call(rank)));
        // A rank that only sends may be in a later call when it learns that an earlier one did not match.
        let mine = if own.sequence == sequence { own } else { self.inner.state.own_call(sequence) };
        let mut calls: Vec<(usize, Trace)> = theirs.chain([(self.members()[self.rank()], mine)]).collect();
        calls.sort_by_key(|(rank, _)| *rank);
        CommError::Mismatch { group: self.inner.state.group.clone(), calls }
    }

    fn timed_out(&self, cx: &Context<'_>, call: &Trace, missing: &[usize]) -> CommError {
        let process = &self.inner.process;
        let missing_rank = |&rank: &usize| {
            let member = self.members()[rank];
            let info = &process.ranks[member];
            let last_call = self.inner.state.last_call(rank);
            (
                member,
                MissingRank {
                    host: info.host.clone(),
                    pid: info.pid,
                    last_call,
                    state: process.state_of(member),
                },
            )
        };
        let missing = missing.iter().map(missing_rank).collect();
        CommError::Timeout {
            group: self.inner.state.group.clone(),
            call: call.clone(),
            after: cx.watch.timeout,
            missing,
        }
    }

    /// The ranks that have not made the call that this rank is in. A rank that is waited for may itself wait for another, so
    /// the numbers of the last calls decide. Where they are not known, it is the ranks that this rank waited for.
    fn missing(&self, cx: &Context<'_>, stop: Stop, late: Vec<usize>) -> Vec<usize> {
        let is_behind = |&rank: &usize| {
            self.inner.state.last_collective(rank).is_none_or(|call| call.sequence < cx.sequence)
        };
        let behind: Vec<usize> = self.others().filter(is_behind).collect();
        match stop {
            _ if !behind.is_empty() => behind,
            Stop::Silent(awaited) => awaited,
            _ => late,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.rank();
        (0..self.size()).filter(move |&rank| rank != me)
    }

    /// Asks the ranks of other nodes for their last call, or for their `sequence`-th, and waits until they have answered or
    /// have had time to.
    fn collect_last_calls(&self, sequence: Option<u64>) {
        if self.num_nodes() == 1 {
            return;
        }
        self.inner.process.monitor.ask(&self.inner.state, sequence.unwrap_or(u64::MAX));
        let deadline = Instant::now() + REPORT_WAIT;
        let fits = |call: Trace| sequence.is_none_or(|sequence| call.sequence == sequence);
        let known = |rank| self.inner.state.last_collective(rank).is_some_and(fits);
        while Instant::now() < deadline && !self.others().all(known) && self.inner.state.cause().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
