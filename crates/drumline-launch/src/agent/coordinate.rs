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
use super::lives::Lives;
use super::silence::{Silence, Silences};
use super::{Happening, clock};
use crate::membership::{AgentId, Cause, Coordinator, Decision, Known, Reason, Report};

/// How often the coordinator looks at the clock at most, and at least: pauses before a restart end by it.
const SHORTEST_LOOK: Duration = Duration::from_millis(10);
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// What the coordinator is told.
#[derive(Debug)]
pub(super) enum ToCoordinator {
    Report(Box<Report>),
    /// The process of this agent is proved dead.
    Died(AgentId),
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

/// The coordinator with all that it works with.
pub(super) struct Desk {
    pub(super) coordinator: Coordinator,
    pub(super) post: Post,
    /// Watches the processes of the other agents; `None` on a single node.
    pub(super) lives: Option<Lives>,
    pub(super) silences: Silences,
    /// How often to look at the clock.
    pub(super) look: Duration,
}

impl Desk {
    /// Coordinates until nobody speaks any more. Says `done` when the job is over and all agents know it.
    pub(super) fn coordinate(mut self, inbox: &Receiver<ToCoordinator>, done: &Sender<()>) {
        let look = self.look.clamp(SHORTEST_LOOK, LONGEST_LOOK);
        loop {
            let heard = match inbox.recv_timeout(look) {
                Ok(heard) => Some(heard),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let decided = self.take(clock::now(), heard);
            if !decided.is_empty() {
                self.post.order_all(&self.coordinator);
                decided.into_iter().for_each(|(decision, why)| self.post.tell(&decision, &why));
            }
            self.watch();
            if self.coordinator.may_exit() {
                let _ = done.send(());
            }
        }
    }

    fn take(&mut self, now: Duration, heard: Option<ToCoordinator>) -> Vec<(Decision, Reason)> {
        match heard {
            Some(ToCoordinator::Report(report)) => {
                let from = report.agent.id;
                let decided = self.coordinator.hear(now, *report);
                self.post.order(&self.coordinator, from);
                decided
            }
            Some(ToCoordinator::Died(agent)) => {
                let known = self.coordinator.state().agents.get(&agent);
                if let Some(known) = known.filter(|known| known.died.is_none()) {
                    self.post.say(Reason::Died { host: known.report.agent.host.clone() }.to_string());
                }
                self.coordinator.hear_of_death(now, agent)
            }
            Some(ToCoordinator::HostLeaves(signal)) => {
                self.coordinator.host_leaves(signal.as_raw());
                self.post.order_all(&self.coordinator);
                self.coordinator.tick(now)
            }
            None => self.coordinator.tick(now),
        }
    }

    /// Watches the processes of all agents but our own, and tells of those that are silent.
    fn watch(&mut self) {
        let Some(lives) = &mut self.lives else { return };
        let (agents, own, now) = (&self.coordinator.state().agents, self.post.own.0, clock::now());
        let others = || agents.iter().filter(|(id, _)| **id != own);
        lives.set(others().map(|(id, known)| (*id, known.report.agent.life.clone())).collect());
        let silence = |(id, known): (&AgentId, &Known)| Silence {
            agent: *id,
            host: known.report.agent.host.clone(),
            span: now.saturating_sub(known.heard),
        };
        let silences: Vec<_> = others().map(silence).collect();
        self.silences.look(&silences).into_iter().for_each(|word| self.post.say(word));
    }
}

impl Post {
    fn order_all(&self, coordinator: &Coordinator) {
        coordinator.agents().into_iter().for_each(|agent| self.order(coordinator, agent));
    }

    /// Lets the person at this node know why a round ends that did not fail; a failure is told by itself.
    fn tell(&self, decision: &Decision, why: &Reason) {
        let is_news = match decision {
            // A death was told when it was proved.
            Decision::Evict(_) => matches!(why, Reason::Silent { .. }),
            Decision::Close(cause) => !matches!(cause, Cause::Failed(_)),
            _ => false,
        };
        if is_news && self.store.is_some() {
            self.say(why.to_string());
        }
    }

    fn say(&self, word: String) {
        let _ = self.own.1.send(Happening::Told(word));
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
