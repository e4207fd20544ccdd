//! The membership policy of a launch plan: its times and counts.

use std::time::Duration;

use crate::membership::Policy;
use crate::plan::{LaunchPlan, Rendezvous};

/// Longer than any job runs.
const EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// For a job whose agents find each other over the network.
pub(super) fn of(plan: &LaunchPlan) -> Policy {
    let patient = Policy::patient(plan.contact.host_timeout, plan.contact.keep_alive_interval);
    let mut policy = Policy {
        min_nodes: plan.nodes.min,
        max_nodes: plan.nodes.max,
        max_restarts: plan.max_restarts,
        join_timeout: plan.join_timeout,
        // A member may be silent at first. Its workers then have the shutdown timeout to end by themselves, and the
        // rest is for killing and reaping them.
        stop_within: patient.evict_after + plan.shutdown_timeout.saturating_add(Duration::from_secs(15)),
        ..patient
    };
    if let Rendezvous::Dynamic { conf, .. } = &plan.rendezvous {
        policy.last_call = conf.last_call_timeout;
    }
    policy
}

/// For a job of one node, whose coordinator runs in the same process: no node can be lost, and no report need be
/// repeated. So a launcher that was suspended (Ctrl-Z) still has its workers when it resumes.
pub(super) fn single_node(plan: &LaunchPlan) -> Policy {
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
    fn both_policies_are_valid() {
        assert_eq!(of(&plan()).check(), Ok(()));
        assert_eq!(single_node(&plan()).check(), Ok(()));
    }
}
