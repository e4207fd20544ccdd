//! When the workers are stopped, and how hard: a pure decision. The clock and the signals are the supervisor's.
//!
//! ```text
//!   Running ──failure, deadline or request──▶ Terminating (a signal) ──grace──▶ Killing (SIGKILL) ──patience──▶ Over
//!      └──────────────── every worker has ended ────────────────┴──────────────────────┴───────────────────────▲
//! ```
//!
//! A rank that fails lets go of its group before it has told its error and ended, so a rank that only missed it may well
//! end first. The stop therefore comes a moment (*settle*) after the first failure: the rank at fault can still speak.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::report::StopReason;

/// How the failure of one worker touches the others, and how patient a stop is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StopPolicy {
    /// What the first failure does to the others.
    pub on_failure: OnFailure,
    /// Time that the others have after the first failure to end by themselves, before SIGTERM.
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
    /// They are stopped: a job of fewer ranks is of no use.
    StopOthers,
    /// They go on, as in a test of how they take it.
    LetOthersRun,
}

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    Terminating { since: Instant },
    Killing { since: Instant },
    Over,
}

/// What the owner asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// This signal, and after the grace SIGKILL.
    Stop {
        /// The first thing that the workers are told.
        signal: Signal,
        /// Time between the two; the policy's if `None`.
        grace: Option<Duration>,
        /// Where a rank has failed, here or on another node: until then the rank at fault can still speak.
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
    /// The usual way.
    pub(crate) const STOP: Request = Request::Stop { signal: Signal::TERM, grace: None, not_before: None };

    /// What is left to be done of an earlier request and a later one: the hurry wins, and the signal of the one that comes first
    /// to the workers.
    pub(crate) fn and(self, later: Request, policy: &StopPolicy) -> Request {
        let Request::Stop { signal, grace, not_before } = self else { return Request::Kill };
        let Request::Stop { signal: another, grace: other, not_before: earlier } = later else {
            return Request::Kill;
        };
        let signal = if earlier < not_before { another } else { signal };
        let grace = grace.unwrap_or(policy.grace).min(other.unwrap_or(policy.grace));
        // `None` is the least: at once.
        Request::Stop { signal, grace: Some(grace), not_before: not_before.min(earlier) }
    }

    /// When it is to be carried out, if not at once.
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

/// All that the decision looks at besides the clock.
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

/// Why a running job must be stopped, if it must.
pub(crate) fn reason(now: Instant, view: &View, policy: &StopPolicy) -> Option<StopReason> {
    let stops = |failure: &FirstFailure| stop_at(failure, policy).is_some_and(|at| now >= at);
    let failure = view.first_failed.filter(stops).map(|failure| StopReason::Failure { rank: failure.rank });
    let is_due = |request: &Request| request.not_before().is_none_or(|at| now >= at);
    let asked = view.request.filter(is_due).map(|_| StopReason::Asked);
    let deadline = view.deadline.filter(|deadline| now >= *deadline).map(|_| StopReason::Deadline);
    failure.or(asked).or(deadline)
}

/// When to decide again if nothing happens before.
pub(crate) fn next_look(phase: Phase, view: &View, policy: &StopPolicy) -> Option<Instant> {
    match phase {
        Phase::Running => {
            let failure = view.first_failed.and_then(|failure| stop_at(&failure, policy));
            let asked = view.request.and_then(Request::not_before);
            [failure, asked, view.deadline].into_iter().flatten().min()
        }
        Phase::Terminating { since } => since.checked_add(view.grace(policy)),
        Phase::Killing { since } => since.checked_add(policy.patience),
        Phase::Over => None,
    }
}

/// When the others are stopped for a failure; `None`: never.
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
    fn failure_goes_through_grace_and_patience() {
        let (began, policy) = (Instant::now(), StopPolicy::default());
        let calm = View { alive: 2, ..View::default() };
        let failed = View { first_failed: failed(1, began), ..calm };
        assert_eq!(decide(began, Phase::Running, &calm, &policy), Phase::Running);
        assert_eq!(
            decide(began, Phase::Running, &failed, &policy),
            Phase::Running,
            "it may settle by itself"
        );
        let t = began + policy.settle;
        assert_eq!(next_look(Phase::Running, &failed, &policy), Some(t));
        let terminating = decide(t, Phase::Running, &failed, &policy);
        assert_eq!(terminating, Phase::Terminating { since: t });
        assert_eq!(next_look(terminating, &failed, &policy), Some(at(t, 5)));
        assert_eq!(decide(at(t, 4), terminating, &failed, &policy), terminating);
        let killing = decide(at(t, 5), terminating, &failed, &policy);
        assert_eq!(killing, Phase::Killing { since: at(t, 5) });
        assert_eq!(decide(at(t, 9), killing, &failed, &policy), killing);
        assert_eq!(decide(at(t, 10), killing, &failed, &policy), Phase::Over);
    }

    #[test]
    fn others_run_on_when_the_policy_says_so_until_the_deadline() {
        let t = Instant::now();
        let policy = StopPolicy { on_failure: OnFailure::LetOthersRun, ..StopPolicy::default() };
        let first_failed = failed(0, t);
        let failed = View { alive: 1, first_failed, deadline: Some(at(t, 3)), ..View::default() };
        assert_eq!(decide(at(t, 2), Phase::Running, &failed, &policy), Phase::Running);
        assert_eq!(next_look(Phase::Running, &failed, &policy), Some(at(t, 3)));
        assert_eq!(reason(at(t, 3), &failed, &policy), Some(StopReason::Deadline));
        assert_eq!(
            decide(at(t, 3), Phase::Running, &failed, &policy),
            Phase::Terminating { since: at(t, 3) }
        );
    }

    #[test]
    fn a_request_brings_its_own_grace_and_the_shorter_one_wins() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let grace = |seconds| Some(Duration::from_secs(seconds));
        let stop = |signal, seconds| Request::Stop { signal, grace: grace(seconds), not_before: None };
        let both = stop(Signal::INT, 9).and(stop(Signal::TERM, 2), &policy);
        assert_eq!(both, stop(Signal::INT, 2));
        assert_eq!(Request::STOP.and(stop(Signal::INT, 9), &policy), stop(Signal::TERM, 5));
        assert_eq!(both.and(Request::Kill, &policy), Request::Kill);
        let view = View { alive: 1, request: Some(both), ..View::default() };
        let terminating = decide(t, Phase::Running, &view, &policy);
        assert_eq!(terminating, Phase::Terminating { since: t });
        assert_eq!(next_look(terminating, &view, &policy), Some(at(t, 2)));
        assert_eq!(decide(at(t, 2), terminating, &view, &policy), Phase::Killing { since: at(t, 2) });
    }

    #[test]
    fn a_stop_for_another_ranks_failure_lets_the_rank_at_fault_speak_unless_the_owner_is_in_a_hurry() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let not_before = Some(t + policy.settle);
        let request = Request::Stop { signal: Signal::TERM, grace: None, not_before };
        let view = View { alive: 1, request: Some(request), first_failed: failed(0, t), ..View::default() };
        assert_eq!(decide(t, Phase::Running, &view, &policy), Phase::Running);
        assert_eq!(next_look(Phase::Running, &view, &policy), not_before);
        let later = t + policy.settle;
        assert_eq!(decide(later, Phase::Running, &view, &policy), Phase::Terminating { since: later });
        let hurried = View { request: Some(request.and(Request::STOP, &policy)), ..view };
        let own = Request::Stop { signal: Signal::USR1, grace: None, not_before: None };
        assert_eq!(request.and(own, &policy).signal(), Signal::USR1, "it comes to the workers first");
        assert_eq!(own.and(request, &policy).signal(), Signal::USR1);
        assert_eq!(decide(t, Phase::Running, &hurried, &policy), Phase::Terminating { since: t });
    }

    #[test]
    fn a_kill_request_skips_the_grace_and_nobody_alive_ends_it() {
        let (t, policy) = (Instant::now(), StopPolicy::default());
        let kill = View { alive: 1, request: Some(Request::Kill), ..View::default() };
        for phase in [Phase::Running, Phase::Terminating { since: t }] {
            assert_eq!(decide(t, phase, &kill, &policy), Phase::Killing { since: t });
        }
        let empty = View { alive: 0, ..kill };
        assert_eq!(decide(t, Phase::Running, &empty, &policy), Phase::Over);
    }
}
