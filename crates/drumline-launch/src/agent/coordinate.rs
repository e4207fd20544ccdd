//! The thread that runs the coordinator on the host of the control store: it receives reports and sends orders.
//!
//! ```text
//!   this node's agent ── channel ─┐                        ┌─ channel ──▶ this node's agent
//!   other agents ── REPORTS log ──┴▶ Coordinator ─ orders ─┴─ their logs ─▶ other agents
//! ```

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use drumline_rendezvous::{Store, TcpStore};
use rustix::process::Signal;

use super::control::{AgentHandle, orders_of};
use super::liveness::LivenessMonitor;
use super::silence::{Silence, SilenceNotices};
use super::{AgentEvent, clock};
use crate::membership::{AgentId, Cause, Coordinator, Decision, KnownAgent, Reason, Report};

/// The bounds of the coordinator's polling interval. A pause before a restart ends at the next poll.
const SHORTEST_POLL: Duration = Duration::from_millis(10);
const LONGEST_POLL: Duration = Duration::from_millis(500);

/// An event for the coordinator.
#[derive(Debug)]
pub(super) enum ToCoordinator {
    Report(Box<Report>),
    /// It is proved that the process of this agent has ended.
    Died(AgentId),
    /// This signal asked the agent in the same process to leave.
    HostLeaves(Signal),
}

/// Sends orders to all agents.
pub(super) struct OrderSender {
    /// The agent of this node.
    pub(super) own: AgentHandle,
    /// The store in which the other agents read their orders; `None` on a single node.
    pub(super) store: Option<TcpStore>,
}

/// The coordinator, and what its thread needs to run it.
pub(super) struct CoordinatorLoop {
    pub(super) coordinator: Coordinator,
    pub(super) orders: OrderSender,
    /// Watches the processes of the other agents; `None` on a single node.
    pub(super) monitor: Option<LivenessMonitor>,
    pub(super) silences: SilenceNotices,
    /// How often to check the clock.
    pub(super) poll_interval: Duration,
}

impl CoordinatorLoop {
    /// Runs until all senders are gone. Signals `done` when the job is over and all agents know it.
    pub(super) fn run(mut self, inbox: &Receiver<ToCoordinator>, done: &Sender<()>) {
        let poll_interval = self.poll_interval.clamp(SHORTEST_POLL, LONGEST_POLL);
        loop {
            let event = match inbox.recv_timeout(poll_interval) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let decided = self.handle(clock::now(), event);
            if !decided.is_empty() {
                self.orders.order_all(&self.coordinator);
                decided.into_iter().for_each(|(decision, why)| self.orders.announce(&decision, &why));
            }
            self.watch_agents();
            if self.coordinator.may_exit() {
                let _ = done.send(());
            }
        }
    }

    fn handle(&mut self, now: Duration, event: Option<ToCoordinator>) -> Vec<(Decision, Reason)> {
        match event {
            Some(ToCoordinator::Report(report)) => {
                let from = report.agent.id;
                let decided = self.coordinator.receive_report(now, *report);
                self.orders.order(&self.coordinator, from);
                decided
            }
            Some(ToCoordinator::Died(agent)) => {
                let known = self.coordinator.state().agents.get(&agent);
                if let Some(known) = known.filter(|known| known.died.is_none()) {
                    self.orders.say(Reason::Died { host: known.report.agent.host.clone() }.to_string());
                }
                self.coordinator.receive_death_proof(now, agent)
            }
            Some(ToCoordinator::HostLeaves(signal)) => {
                self.coordinator.host_leaves(signal.as_raw());
                self.orders.order_all(&self.coordinator);
                self.coordinator.tick(now)
            }
            None => self.coordinator.tick(now),
        }
    }

    /// Watches the processes of all other agents, and reports those that are silent.
    fn watch_agents(&mut self) {
        let Some(monitor) = &mut self.monitor else { return };
        let agents = &self.coordinator.state().agents;
        let own = self.orders.own.id;
        let now = clock::now();
        let others = || agents.iter().filter(|(id, _)| **id != own);
        monitor.set(others().map(|(id, known)| (*id, known.report.agent.life.clone())).collect());
        let silence = |(id, known): (&AgentId, &KnownAgent)| Silence {
            agent: *id,
            host: known.report.agent.host.clone(),
            span: now.saturating_sub(known.last_heard),
        };
        let silences: Vec<_> = others().map(silence).collect();
        self.silences.update(&silences).into_iter().for_each(|notice| self.orders.say(notice));
    }
}

impl OrderSender {
    fn order_all(&self, coordinator: &Coordinator) {
        coordinator.agents().into_iter().for_each(|agent| self.order(coordinator, agent));
    }

    /// Shows the user at this node why a round ends, unless it failed: a failure has its own report.
    fn announce(&self, decision: &Decision, why: &Reason) {
        let is_news = match decision {
            // A death was announced when it was proved.
            Decision::Evict(_) => matches!(why, Reason::Silent { .. }),
            Decision::Close(cause) => !matches!(cause, Cause::Failed(_)),
            _ => false,
        };
        if is_news && self.store.is_some() {
            self.say(why.to_string());
        }
    }

    fn say(&self, notice: String) {
        let _ = self.own.events.send(AgentEvent::Notice(notice));
    }

    /// Sends an agent its current order.
    fn order(&self, coordinator: &Coordinator, agent: AgentId) {
        let Some(order) = coordinator.order(agent) else { return };
        if agent == self.own.id {
            let _ = self.own.events.send(AgentEvent::Order(Box::new(order)));
            return;
        }
        let Some(store) = &self.store else { return };
        let sent = serde_json::to_vec(&order).map(|mut line| {
            line.push(b'\n');
            store.append(&orders_of(agent), &line)
        });
        if !matches!(sent, Ok(Ok(_))) {
            tracing::debug!(?sent, "an order could not be sent; the answer to the next report repeats it");
        }
    }
}
