//! Decides when the workers are stopped, and how: a pure function. The supervisor has the clock and sends the signals.
//!
//! ```text
//!   Running ──failure, deadline or request──▶ Terminating (a signal) ──grace──▶ Killing (SIGKILL) ──patience──▶ Over
//!      └──────────────── every worker has ended ────────────────┴──────────────────────┴───────────────────────▲
//! ```
//!
//! A rank that fails leaves its group before it prints its error and ends, so a rank that only missed it may end first.
//! The stop therefore comes a moment (*settle*) after the first failure: the rank at fault can still print its error.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::report::StopReason;

/// What a failure does to the other workers, and how long each step of a stop takes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StopPolicy {
    /// What the first failure does to the others.
    pub on_failure: OnFailure,
    /// How long the others may take to end by themselves after the first failure, before SIGTERM.
    pub settle: Duration,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Time after SIGKILL before a worker is given up as unkillable.
    pub patience: Duration,
}

impl Default for StopPolicy {
    fn default() -> Self {
        let seconds = Duration::from_secs(5);
        let settle = Duration::from_millis(400);
        Self { on_failure: OnFailure::StopOthers, settle, grace: seconds, patience: seconds }
    }
}

/// What the first failure does to the other workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnFailure {
    /// They are stopped: the job cannot continue with fewer ranks.
    StopOthers,
    /// They keep running, as for a test of how they react.
    LetOthersRun,
}

/// The phase of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    Terminating { since: Instant },
    Killing { since: Instant },
    Over,
}

/// A stop that the owner requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Send this signal, and SIGKILL after the grace time.
    Stop {
        /// The first signal that the workers get.
        signal: Signal,
        /// The time between the two; the policy's if `None`.
        grace: Option<Duration>,
        /// Set if a rank has failed, here or on another node: until then the rank at fault can still print its error.
        not_before: Option<Instant>,
    },
    /// SIGKILL at once.
    Kill,
}

/// The failure that was seen first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FirstFailure {
    pub(crate) rank: usize,
    pub(crate) at: Instant,
}

impl Request {
    /// The usual stop: SIGTERM with the policy's grace time.
    pub(crate) const STOP: Request = Request::Stop { signal: Signal::TERM, grace: None, not_before: None };

    /// Merges an earlier request with a later one: the shorter times win, and the signal of the request that is due
    /// first.
    pub(crate) fn merge(self, later: Request, policy: &StopPolicy) -> Request {
        let Request::Stop { signal, grace, not_before } = self else { return Request::Kill };
        let Request::Stop { signal: later_signal, grace: later_grace, not_before: later_not_before } = later
        else {
            return Request::Kill;
        };
        let signal = if later_not_before < not_before { later_signal } else { signal };
        let grace = grace.unwrap_or(policy.grace).min(later_grace.unwrap_or(policy.grace));
        // `None` means at once, and is the smallest.
        Request::Stop { signal, grace: Some(grace), not_before: not_before.min(later_not_before) }
    }

    /// When it is due; `None` if at once.
    fn not_before(self) -> Option<Instant> {
        match self {
            Request::Stop { not_before, .. } => not_before,
            Request::Kill => None,
        }
    }

    pub(crate) fn signal(self) -> Signal {
        match self {
            Request::Stop { signal, .. } => signal,
            Request::Kill => Signal::KILL,
        }
    }
}

/// All inputs of the decision besides the clock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct View {
    pub(crate) alive: usize,
    pub(crate) first_failed: Option<FirstFailure>,
    pub(crate) request: Option<Request>,
    pub(crate) deadline: Option<Instant>,
}

impl View {
    /// Time between the first signal and SIGKILL.
    fn grace(&self, policy: &StopPolicy) -> Duration {
        match self.request {
            Some(Request::Stop { grace: Some(grace), .. }) => grace,
            _ => policy.grace,
        }
    }
}

/// The phase to be in now.
pub(crate) fn decide(now: Instant, phase: Phase, view: &View, policy: &StopPolicy) -> Phase {
    let kill = view.request == Some(Request::Kill);
    match phase {
        _ if view.alive == 0 => Phase::Over,
        Phase::Running if kill => Phase::Killing { since: now },
        Phase::Running if reason(now, view, policy).is_some() => Phase::Terminating { since: now },
        Phase::Terminating { since } if kill || now - since >= view.grace(policy) => {
            Phase::Killing { since: now }
        }
        Phase::Killing { since } if now - since >= policy.patience => Phase::Over,
        unchanged => unchanged,
    }
}

/// Why a running job must be stopped now, if so.
pub(crate) fn reason(now: Instant, view: &View, policy: &StopPolicy) -> Option<StopReason> {
    let stops = |failure: &FirstFailure| stop_at(failure, policy).is_some_and(|at| now >= at);
    let failure = view.first_failed.filter(stops).map(|failure| StopReason::Failure { rank: failure.rank });
    let is_due = |request: &Request| request.not_before().is_none_or(|at| now >= at);
    let requested = view.request.filter(is_due).map(|_| StopReason::Asked);
    let deadline = view.deadline.filter(|deadline| now >= *deadline).map(|_| StopReason::Deadline);
    failure.or(requested).or(deadline)
}

/// When to decide again if nothing happens first.
pub(crate) fn next_deadline(phase: Phase, view: &View, policy: &StopPolicy) -> Option<Instant> {
    match phase {
        Phase::Running => {
            let failure = view.first_failed.and_then(|failure| stop_at(&failure, policy));
            let requested = view.request.and_then(Request::not_before);
            [failure, requested, view.deadline].into_iter().flatten().min()
        }
        Phase::Terminating { since } => since.checked_add(view.grace(policy)),
        Phase::Killing { since } => since.checked_add(policy.patience),
        Phase::Over => None,
    }
}

/// When the others are stopped because of a failure; `None` if never.
fn stop_at(failure: &FirstFailure, policy: &StopPolicy) -> Option<Instant> {
    let stops = policy.on_failure == OnFailure::StopOthers;
    stops.then(|| failure.at.checked_add(policy.settle)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(rank: usize, at: Instant) -> Option<FirstFailure> {
        Some(FirstFailure { rank, at })
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    #[test]
    fn a_failure_leads_to_sigterm_then_sigkill_then_giving_up() {
        let (began, policy) = (Instant::now(), StopPolicy::default());
        let healthy = View { alive: 2, ..View::default() };
        let failed = View { first_failed: failed(1, began), ..healthy };
        assert_eq!(decide(began, Phase::Running, &healthy, &policy), Phase::Running);
        assert_eq!(
            decide(began, Phase::Running, &failed, &policy),
            Phase::Running,
            "the others may end by themselves"
        );
        let t = began + policy.settle;
        assert_eq!(next_deadline(Phase::Running, &failed, &policy), Some(t));
        let terminating = decide(t, Phase::Running, &failed, &policy);
        assert_eq!(terminating, Phase::Terminating { since: t });
        assert_eq!(next_deadline(terminating, &failed, &policy), Some(at(t, 5)));
        assert_eq!(decide(at(t, 4), terminating, &failed, &policy), terminating);
        let killing = decide(at(t, 5), terminating, &failed, &policy);
        assert_eq!(killing, Phase::Killing { since: at(t, 5) });
        assert_eq!(decide(at(t, 9), killing, &failed, &policy), killing);
        assert_eq!(decide(at(t, 10), killing, &failed, &policy), Phase::Over);
    }

    #[test]
    fn with_let_others_run_the_others_run_until_the_deadline() {
        let t = Instant::now();
        let policy = StopPolicy { on_failure: OnFailure::LetOthersRun, ..StopPolicy::default() };
        let first_failed = failed(0, t);
        let failed = View { alive: 1, first_failed, deadline: Some(at(t, 3)), ..View::default() };
        assert_eq!(decide(at(t, 2), Phase::Running, &failed, &policy), Phase::Running);
        assert_eq!(next_deadline(Phase::Running, &failed, &policy), Some(at(t, 3)));
        assert_eq!(reason(at(t, 3), &failed, &policy), Some(StopReason::Deadline));
        assert_eq!(
            decide(at(t, 3), Phase::Running, &failed, &policy),
            Phase::Terminating { since: at(t, 3) }
        );
    }

    #[test]
    fn a_request_has_its_own_grace_and_the_shorter_one_wins() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let grace = |seconds| Some(Duration::from_secs(seconds));
        let stop = |signal, seconds| Request::Stop { signal, grace: grace(seconds), not_before: None };
        let both = stop(Signal::INT, 9).merge(stop(Signal::TERM, 2), &policy);
        assert_eq!(both, stop(Signal::INT, 2));
        assert_eq!(Request::STOP.merge(stop(Signal::INT, 9), &policy), stop(Signal::TERM, 5));
        assert_eq!(both.merge(Request::Kill, &policy), Request::Kill);
        let view = View { alive: 1, request: Some(both), ..View::default() };
        let terminating = decide(t, Phase::Running, &view, &policy);
        assert_eq!(terminating, Phase::Terminating { since: t });
        assert_eq!(next_deadline(terminating, &view, &policy), Some(at(t, 2)));
        assert_eq!(decide(at(t, 2), terminating, &view, &policy), Phase::Killing { since: at(t, 2) });
    }

    #[test]
    fn a_stop_after_a_failure_waits_for_settle_unless_the_owner_requests_one() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let not_before = Some(t + policy.settle);
        let request = Request::Stop { signal: Signal::TERM, grace: None, not_before };
        let view = View { alive: 1, request: Some(request), first_failed: failed(0, t), ..View::default() };
        assert_eq!(decide(t, Phase::Running, &view, &policy), Phase::Running);
        assert_eq!(next_deadline(Phase::Running, &view, &policy), not_before);
        let later = t + policy.settle;
        assert_eq!(decide(later, Phase::Running, &view, &policy), Phase::Terminating { since: later });
        let hurried = View { request: Some(request.merge(Request::STOP, &policy)), ..view };
        let own = Request::Stop { signal: Signal::USR1, grace: None, not_before: None };
        assert_eq!(request.merge(own, &policy).signal(), Signal::USR1, "it reaches the workers first");
        assert_eq!(own.merge(request, &policy).signal(), Signal::USR1);
        assert_eq!(decide(t, Phase::Running, &hurried, &policy), Phase::Terminating { since: t });
    }

    #[test]
    fn a_kill_request_skips_the_grace_and_no_live_worker_means_over() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let kill = View { alive: 1, request: Some(Request::Kill), ..View::default() };
        for phase in [Phase::Running, Phase::Terminating { since: t }] {
            assert_eq!(decide(t, phase, &kill, &policy), Phase::Killing { since: t });
        }
        let empty = View { alive: 0, ..kill };
        assert_eq!(decide(t, Phase::Running, &empty, &policy), Phase::Over);
    }
}
