//! The times and counts that membership decisions use, checked once.
//!
//! All times of silence follow from one number, the *host timeout* ([`Policy::patient`]): how long a silent host is
//! tolerated.
//!
//! ```text
//!   0 ── the agent sends the last report that was answered
//!   │ heartbeat: reports; one that is not answered is sent again over a new connection
//!   ├ host_timeout: an outage that ends before this changes nothing
//!   ├ patience      the agent stops its workers: SIGTERM
//!   ├ lease         what still runs is killed; the keeper does so even if the agent is frozen
//!   ├ + kill_within no worker runs any more
//!   └ evict_after   the coordinator evicts the agent
//! ```

use std::time::Duration;

use drumline_rendezvous::worker_env;

/// The times and counts of an elastic job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The minimum number of nodes in a round.
    pub min_nodes: usize,
    /// The maximum number of nodes in a round. Further agents wait as spares.
    pub max_nodes: usize,
    /// How long to wait for `min_nodes` to join.
    pub join_timeout: Duration,
    /// How long to wait for more nodes at the start, once `min_nodes` have joined.
    pub last_call: Duration,
    /// The same for later rounds: short, because the job stands still.
    pub settle: Duration,
    /// An agent reports at least this often.
    pub heartbeat: Duration,
    /// How long a silent host is tolerated. The times below follow from it.
    pub host_timeout: Duration,
    /// An agent stops its workers with SIGTERM this long after it sent the last report that was answered.
    pub patience: Duration,
    /// An agent kills its workers this long after it sent the last report that was answered.
    pub lease: Duration,
    /// Killed workers have ended within this time.
    pub kill_within: Duration,
    /// The coordinator evicts an agent that has been silent for this long.
    pub evict_after: Duration,
    /// An agent that the job cannot take back exits after this long without contact: the store's host is dead or cut
    /// off. An agent that the job can take back waits for `join_timeout`.
    pub give_up_after: Duration,
    /// An agent that leaves waits this long for the coordinator's answer.
    pub leave_within: Duration,
    /// A round that is being closed must stop within this time, or the job fails.
    pub stop_within: Duration,
    /// How often the workers may be restarted after a failure, in the whole job.
    pub max_restarts: usize,
    /// The pause before a restart after quick failures.
    pub back_off: BackOff,
    /// When repeated failures end the job although restarts are left.
    pub crash_loop: CrashLoop,
}

/// The pause before a restart: none after the first quick failure, then doubling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The pause after the second quick failure in a row.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
}

/// What counts as a crash loop: the same rank fails quickly several times in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashLoop {
    /// A failure is quick when the worker ran for less than this.
    pub within: Duration,
    /// This many quick failures in a row end the job.
    pub times: usize,
}

/// Why a policy is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The range of nodes is empty or begins at 0.
    #[error("node range {min}:{max} is empty; try MIN:MAX with 1 <= MIN <= MAX")]
    Nodes {
        /// The lower end.
        min: usize,
        /// The upper end.
        max: usize,
    },
    /// The workers of an evicted agent might still run.
    #[error(
        "lease {lease:?} and kill time {kill:?} must together be shorter than the eviction time {evict:?}; \
         try a shorter lease"
    )]
    Lease {
        /// The lease.
        lease: Duration,
        /// The time within which killed workers have ended.
        kill: Duration,
        /// The eviction time.
        evict: Duration,
    },
    /// A single lost report would stop the workers.
    #[error(
        "patience {patience:?} must span at least two heartbeats of {heartbeat:?}; try a shorter heartbeat"
    )]
    Heartbeat {
        /// The patience.
        patience: Duration,
        /// The time between reports.
        heartbeat: Duration,
    },
    /// Workers would be killed before they are asked to stop.
    #[error("patience {patience:?} must end before the lease of {lease:?}; try a longer lease")]
    Patience {
        /// The patience.
        patience: Duration,
        /// The lease.
        lease: Duration,
    },
}

impl Default for Policy {
    fn default() -> Self {
        Policy::patient(worker_env::DEFAULT_HOST_TIMEOUT, HEARTBEAT)
    }
}

/// The default time between reports of an agent.
pub const HEARTBEAT: Duration = Duration::from_millis(500);
/// The shortest host timeout: a busy machine may need this long to answer.
pub const SHORTEST_HOST_TIMEOUT: Duration = Duration::from_secs(1);
/// The last answered report was sent before the outage began, and the next one is answered after it ended. This covers
/// both delays.
const SLACK: Duration = Duration::from_secs(2);
/// The longest time between SIGTERM and SIGKILL of workers whose agent has lost contact.
const LONGEST_GRACE: Duration = Duration::from_secs(2);

impl Policy {
    /// The policy of a one-node job that waits `host_timeout` for a silent host. Agents report every `heartbeat`, or
    /// more often if the host timeout needs it. A host timeout below a second counts as one second.
    pub fn patient(host_timeout: Duration, heartbeat: Duration) -> Self {
        let host_timeout = host_timeout.max(SHORTEST_HOST_TIMEOUT);
        let patience = host_timeout + SLACK;
        let lease = patience + (host_timeout / 4).min(LONGEST_GRACE);
        let kill_within = Duration::from_secs(1);
        let evict_after = lease + kill_within + HEARTBEAT;
        Policy {
            min_nodes: 1,
            max_nodes: 1,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            settle: Duration::from_millis(500),
            heartbeat: heartbeat.min(host_timeout / 4),
            host_timeout,
            patience,
            lease,
            kill_within,
            evict_after,
            give_up_after: evict_after + Duration::from_secs(3),
            leave_within: Duration::from_secs(3),
            stop_within: Duration::from_secs(45) + evict_after,
            max_restarts: 0,
            back_off: BackOff { first: Duration::from_secs(1), longest: Duration::from_secs(30) },
            crash_loop: CrashLoop { within: Duration::from_secs(5), times: 5 },
        }
    }

    /// Whether the number of nodes may change in a running job.
    pub fn is_elastic(&self) -> bool {
        self.min_nodes < self.max_nodes
    }

    /// An agent that has been silent for longer does not become a member of a new round.
    pub fn fresh_within(&self) -> Duration {
        (4 * self.heartbeat).max(2 * SLACK)
    }

    /// Checks that these times can keep the promises of [`membership`](super).
    pub fn check(&self) -> Result<(), PolicyError> {
        let Policy { min_nodes: min, max_nodes: max, patience, lease, kill_within: kill, heartbeat, .. } =
            *self;
        if min == 0 || min > max {
            return Err(PolicyError::Nodes { min, max });
        }
        if lease + kill >= self.evict_after {
            return Err(PolicyError::Lease { lease, kill, evict: self.evict_after });
        }
        if patience >= lease {
            return Err(PolicyError::Patience { patience, lease });
        }
        if patience < 2 * heartbeat {
            return Err(PolicyError::Heartbeat { patience, heartbeat });
        }
        Ok(())
    }

    /// The pause before the restart that follows `quick` quick failures in a row.
    pub fn pause(&self, quick: usize) -> Duration {
        let Some(doublings) = quick.checked_sub(2) else { return Duration::ZERO };
        let factor = 1 << doublings.min(16);
        self.back_off.first.saturating_mul(factor).min(self.back_off.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_timeout_is_valid_and_bad_policies_are_rejected() {
        for host_timeout in [0, 1, 2, 5, 30, 90, 86_400, 100 * 365 * 86_400].map(Duration::from_secs) {
            for heartbeat in [HEARTBEAT, Duration::from_secs(5), Duration::from_secs(30)] {
                let policy = Policy::patient(host_timeout, heartbeat);
                assert_eq!(policy.check(), Ok(()), "{host_timeout:?}, {heartbeat:?}");
                assert!(policy.patience > host_timeout, "{policy:?}");
            }
        }
        let long = Policy { lease: Duration::from_secs(35), ..Policy::default() };
        assert!(matches!(long.check(), Err(PolicyError::Lease { .. })));
        let impatient = Policy { patience: Duration::from_secs(34), ..Policy::default() };
        assert!(matches!(impatient.check(), Err(PolicyError::Patience { .. })));
        let rare = Policy { heartbeat: Duration::from_secs(20), ..Policy::default() };
        assert!(matches!(rare.check(), Err(PolicyError::Heartbeat { .. })));
        let empty = Policy { min_nodes: 3, max_nodes: 2, ..Policy::default() };
        assert_eq!(empty.check(), Err(PolicyError::Nodes { min: 3, max: 2 }));
    }

    #[test]
    fn the_first_restart_is_immediate_and_later_pauses_grow() {
        let policy = Policy::default();
        let pauses: Vec<u64> = [0, 1, 2, 3, 4, 9, 99].map(|quick| policy.pause(quick).as_secs()).to_vec();
        assert_eq!(pauses, [0, 0, 1, 2, 4, 30, 30]);
    }
}
