//! The times and counts that decisions follow, checked once.

use std::time::Duration;

/// The times and counts of an elastic job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Fewest nodes with which a round may run.
    pub min_nodes: usize,
    /// Most nodes in a round; agents beyond it wait as spares.
    pub max_nodes: usize,
    /// How long fewer than `min_nodes` are waited for.
    pub join_timeout: Duration,
    /// How long more nodes are waited for at the start, once `min_nodes` are there.
    pub last_call: Duration,
    /// The same when a round is formed anew: short, as the job stands still.
    pub settle: Duration,
    /// An agent reports at least this often.
    pub heartbeat: Duration,
    /// An agent kills its workers this long after it sent the last report that was answered.
    pub lease: Duration,
    /// Killed workers are dead within this time.
    pub kill_within: Duration,
    /// An agent not heard for this long is no longer counted on.
    pub evict_after: Duration,
    /// An agent without contact for this long ends: the store's host is dead or cut off.
    pub give_up_after: Duration,
    /// A round that is being closed must stop within this time, or the job ends.
    pub stop_within: Duration,
    /// How often the workers may be started again after a failure, in the whole job.
    pub max_restarts: usize,
    /// The pause before a restart after quick failures.
    pub back_off: BackOff,
    /// When failing again and again ends the job although restarts are left.
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

/// The same rank failing quickly, so many times in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashLoop {
    /// A failure is quick when the worker ran for less than this.
    pub within: Duration,
    /// So many in a row end the job.
    pub times: usize,
}

/// A policy that cannot hold.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The range of nodes is empty or begins at nothing.
    #[error("node range {min}:{max} is empty; try MIN:MAX with 1 <= MIN <= MAX")]
    Nodes {
        /// The lower end.
        min: usize,
        /// The upper end.
        max: usize,
    },
    /// An evicted agent's workers might still run.
    #[error(
        "lease {lease:?} and kill time {kill:?} must together be shorter than the eviction time {evict:?}; \
         try a shorter lease"
    )]
    Lease {
        /// The lease.
        lease: Duration,
        /// The time in which killed workers are dead.
        kill: Duration,
        /// The eviction time.
        evict: Duration,
    },
    /// A single lost report would end the lease.
    #[error("lease {lease:?} must span at least two heartbeats of {heartbeat:?}; try a shorter heartbeat")]
    Heartbeat {
        /// The lease.
        lease: Duration,
        /// The time between reports.
        heartbeat: Duration,
    },
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            min_nodes: 1,
            max_nodes: 1,
            join_timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            settle: Duration::from_millis(500),
            heartbeat: Duration::from_millis(500),
            lease: Duration::from_secs(3),
            kill_within: Duration::from_secs(1),
            evict_after: Duration::from_secs(5),
            give_up_after: Duration::from_secs(8),
            stop_within: Duration::from_secs(40),
            max_restarts: 0,
            back_off: BackOff { first: Duration::from_secs(1), longest: Duration::from_secs(30) },
            crash_loop: CrashLoop { within: Duration::from_secs(5), times: 5 },
        }
    }
}

impl Policy {
    /// Whether the promises can be held with these times.
    pub fn check(&self) -> Result<(), PolicyError> {
        let Policy { min_nodes: min, max_nodes: max, lease, kill_within: kill, .. } = *self;
        if min == 0 || min > max {
            return Err(PolicyError::Nodes { min, max });
        }
        if lease + kill >= self.evict_after {
            return Err(PolicyError::Lease { lease, kill, evict: self.evict_after });
        }
        if lease < 2 * self.heartbeat {
            return Err(PolicyError::Heartbeat { lease, heartbeat: self.heartbeat });
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
    fn the_default_holds_and_bad_ones_are_named() {
        assert_eq!(Policy::default().check(), Ok(()));
        let long = Policy { lease: Duration::from_secs(4), ..Policy::default() };
        assert!(matches!(long.check(), Err(PolicyError::Lease { .. })));
        let rare = Policy { heartbeat: Duration::from_secs(2), ..Policy::default() };
        assert!(matches!(rare.check(), Err(PolicyError::Heartbeat { .. })));
        let empty = Policy { min_nodes: 3, max_nodes: 2, ..Policy::default() };
        assert_eq!(empty.check(), Err(PolicyError::Nodes { min: 3, max: 2 }));
    }

    #[test]
    fn the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() {
        let policy = Policy::default();
        let pauses: Vec<u64> = [0, 1, 2, 3, 4, 9, 99].map(|quick| policy.pause(quick).as_secs()).to_vec();
        assert_eq!(pauses, [0, 0, 1, 2, 4, 30, 30]);
    }
}
