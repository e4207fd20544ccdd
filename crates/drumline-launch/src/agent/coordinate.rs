//! The coordinator at work: a thread on the host of the control store that hears reports and sends orders.
//!
//! ```text
//!   this node's agent ── channel ─┐                        ┌─ channel ──▶ this node's agent
//!   other agents ── REPORTS log ──┴▶ Coordinator ─ orders ─┴─ their logs ─▶ other agents
//! ```

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use drumline_rendezvous::{Store, TcpStore};
use rustix::process::Signal;

use super::control::orders_of;
use super::{Happening, clock};
use crate::membership::{AgentId, Cause, Coordinator, Decision, Reason, Report};

/// How often the coordinator looks at the clock at most, and at least: pauses before a restart end by it.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// What the coordinator is told.
#[derive(Debug)]
pub(super) enum ToCoordinator {
    Report(Box<Report>),
    /// This signal asked the agent beside it to leave.
    HostLeaves(Signal),
}

/// Where orders go.
pub(super) struct Post {
    /// The agent of this node.
    pub(super) own: (AgentId, Sender<Happening>),
    /// The store from which the others read; `None` on a single node.
    pub(super) store: Option<TcpStore>,
}

/// Coordinates until nobody speaks any more. Says `done` when the job is over and all agents know it.
pub(super) fn coordinate(
    mut coordinator: Coordinator,
    inbox: &Receiver<ToCoordinator>,
    post: &Post,
    look: Duration,
    done: &Sender<()>,
) {
    let look = look.clamp(SHORTEST_LOOK, LONGEST_LOOK);
    loop {
        let heard = inbox.recv_timeout(look);
        let now = clock::now();
        let decided = match heard {
            Ok(ToCoordinator::Report(report)) => {
                let from = report.agent.id;
                let decided = coordinator.hear(now, *report);
                post.order(&coordinator, from);
                decided
            }
            Ok(ToCoordinator::HostLeaves(signal)) => {
                coordinator.host_leaves(signal.as_raw());
                post.order_all(&coordinator);
                coordinator.tick(now)
            }
            Err(RecvTimeoutError::Timeout) => coordinator.tick(now),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if !decided.is_empty() {
            post.order_all(&coordinator);
            decided.into_iter().for_each(|(decision, why)| post.tell(&decision, why));
        }
        if coordinator.may_exit() {
            let _ = done.send(());
        }
    }
}

impl Post {
    fn order_all(&self, coordinator: &Coordinator) {
        coordinator.agents().into_iter().for_each(|agent| self.order(coordinator, agent));
    }

    /// Lets the person at this node know why a round ends that did not fail; a failure is told by itself.
    fn tell(&self, decision: &Decision, why: Reason) {
        let is_news = match decision {
            Decision::Evict(_) => true,
            Decision::Close(cause) => !matches!(cause, Cause::Failed(_)),
            _ => false,
        };
        if is_news && self.store.is_some() {
            let _ = self.own.1.send(Happening::Told(why));
        }
    }

    /// Sends an agent what is wanted of it now.
    fn order(&self, coordinator: &Coordinator, agent: AgentId) {
        let Some(order) = coordinator.order(agent) else { return };
        if agent == self.own.0 {
            let _ = self.own.1.send(Happening::Order(Box::new(order)));
            return;
        }
        let Some(store) = &self.store else { return };
        let sent = serde_json::to_vec(&order).map(|mut line| {
            line.push(b'\n');
            store.append(&orders_of(agent), &line)
        });
        if !matches!(sent, Ok(Ok(_))) {
            tracing::debug!(?sent, "an order could not be sent; the next report is answered again");
        }
    }
}
