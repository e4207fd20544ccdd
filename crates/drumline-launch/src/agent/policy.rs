//! The times and counts of a plan's membership.

use std::time::Duration;

use crate::membership::Policy;
use crate::plan::{LaunchPlan, Rendezvous};

/// Longer than any job.
const EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// For a job whose agents find each other over the network.
pub(super) fn of(plan: &LaunchPlan) -> Policy {
    let patient = Policy::patient(plan.contact.host_timeout, plan.contact.keep_alive_interval);
    let mut policy = Policy {
        min_nodes: plan.nodes.min,
        max_nodes: plan.nodes.max,
        max_restarts: plan.max_restarts,
        join_timeout: plan.join_timeout,
        // A member may be silent at first. Told to stop, workers have this long before they are killed, and then they must be
        // reaped.
        stop_within: patient.evict_after + plan.shutdown_timeout.saturating_add(Duration::from_secs(15)),
        ..patient
    };
    if let Rendezvous::Dynamic { conf, .. } = &plan.rendezvous {
        policy.last_call = conf.last_call_timeout;
    }
    policy
}

/// For a job of one node, whose coordinator is in the same process: nobody can be lost, and nothing need be said
/// twice. A launcher that is suspended (Ctrl-Z) finds its workers as they were.
pub(super) fn alone(plan: &LaunchPlan) -> Policy {
    Policy {
        heartbeat: EVER / 8,
        patience: EVER / 4,
        lease: EVER / 2,
        evict_after: EVER,
        give_up_after: EVER,
        ..of(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    #[test]
    fn both_hold() {
        assert_eq!(of(&plan()).check(), Ok(()));
        assert_eq!(alone(&plan()).check(), Ok(()));
    }
}
