//! The messages between agents and the coordinator.
//!
//! Both directions carry complete states, not changes: losing a message costs a heartbeat, receiving one twice costs
//! nothing. Orders have no number of their own: a late one is refused by the fence, or grants no lease.

use serde::{Deserialize, Serialize};
use std::time::Duration;

use super::reason::{Cause, Ending, Reason};

/// An agent's identity: drawn at random when the launcher starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AgentId(pub u128);

/// Who an agent is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentCard {
    /// Its identity.
    pub id: AgentId,
    /// Its host's name, for messages.
    pub host: String,
    /// How many workers it starts.
    pub slots: usize,
    /// Its node rank, if the user assigned one; `None` assigns node ranks in the order in which agents join.
    pub node_rank: Option<usize>,
    /// The minimum and maximum number of nodes that it was started with.
    pub nodes: (usize, usize),
    /// How long it waits for a silent host. The lease follows from it, so all agents must have the same. Zero accepts
    /// any.
    pub host_timeout: Duration,
    /// The `host:port` on which its process listens until it ends; empty if it does not.
    pub life: String,
    /// Where the workers of a round find each other, if this agent is the round's first node.
    #[serde(rename = "door")]
    pub meeting_point: MeetingPoint,
}

/// Where the workers of a round find each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeetingPoint {
    /// The host of rank 0, as the other nodes reach it.
    pub master_addr: String,
    /// A free port there, for services of rank 0.
    pub master_port: u16,
    /// `host:port` of the store that the launcher hosts.
    pub store: String,
}

/// What an agent is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Doing {
    /// Nothing runs here.
    Idle,
    /// Workers of this round run.
    Running(u64),
    /// Workers of this round are being stopped and may still run.
    Stopping(u64),
    /// All workers of this round succeeded.
    Done(u64),
    /// The agent exits: nothing runs here, and nothing will.
    Over,
}

impl Doing {
    /// The round that it takes part in, or took part in.
    pub fn round(self) -> Option<u64> {
        match self {
            Doing::Running(round) | Doing::Stopping(round) | Doing::Done(round) => Some(round),
            Doing::Idle | Doing::Over => None,
        }
    }

    /// The round whose workers may be alive.
    pub fn alive(self) -> Option<u64> {
        match self {
            Doing::Running(round) | Doing::Stopping(round) => Some(round),
            Doing::Idle | Doing::Done(_) | Doing::Over => None,
        }
    }
}

/// A worker that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerFailure {
    /// The round in which it ran.
    pub round: u64,
    /// Its rank in that round.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// How long it ran, on its own agent's clock.
    pub ran_for: Duration,
    /// What happened, for messages.
    pub what: String,
}

/// The complete state of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The agent that reports.
    pub agent: AgentCard,
    /// Grows with each report of this agent.
    pub number: u64,
    /// What it is doing.
    pub doing: Doing,
    /// It will not run this round or an older one.
    pub fence: u64,
    /// Whether it has a lease, which shows that it receives the coordinator's orders. Only such agents become members.
    pub leased: bool,
    /// Whether it has been asked to leave.
    pub leaving: bool,
    /// The failure that the coordinator has not yet acknowledged with a fence.
    pub failure: Option<WorkerFailure>,
}

/// The coordinator's complete instruction to one agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The coordinator's identity, drawn at random at its start.
    pub coordinator: u128,
    /// The number of the latest report received from this agent. The lease counts from when that report was sent.
    pub answers: u64,
    /// The instruction.
    #[serde(rename = "wish")]
    pub instruction: Instruction,
}

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Instruction {
    /// Run nothing up to this round, and wait.
    Hold {
        /// The highest round that must not run.
        fence: u64,
        /// What the job waits for, for messages.
        why: Reason,
    },
    /// Run this round.
    Run(Round),
    /// Continue with what it is doing.
    Keep,
    /// The job, or this agent's part in it, is over.
    End(Ending),
}

/// One agreed membership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Its number, from 1.
    pub number: u64,
    /// How many restarts the job had used when it was formed.
    pub restarts: usize,
    /// Why the round before it ended; `None` for the first one.
    pub after: Option<Cause>,
    /// The members in node order.
    pub members: Vec<Member>,
}

/// An agent's place in a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The agent.
    pub agent: AgentCard,
    /// The rank of its first worker; the others follow.
    pub first_rank: usize,
}

impl Round {
    /// Assigns the ranks of a first round to `agents`, in their order.
    pub fn deal(number: u64, restarts: usize, agents: Vec<AgentCard>) -> Self {
        let mut next = 0;
        let place = |agent: AgentCard| {
            let first_rank = next;
            next += agent.slots;
            Member { agent, first_rank }
        };
        Round { number, restarts, after: None, members: agents.into_iter().map(place).collect() }
    }

    /// The number of ranks.
    pub fn world(&self) -> usize {
        self.members.iter().map(|member| member.agent.slots).sum()
    }

    /// The rank of the first worker of `agent`, if it is a member.
    pub fn first_rank(&self, agent: AgentId) -> Option<usize> {
        Some(self.members[self.node_rank(agent)?].first_rank)
    }

    /// The node rank of `agent`, if it is a member.
    pub fn node_rank(&self, agent: AgentId) -> Option<usize> {
        self.members.iter().position(|member| member.agent.id == agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_nodes_without_gaps() {
        let card =
            |id, slots| AgentCard { id: AgentId(id), host: format!("n{id}"), slots, ..AgentCard::default() };
        let round = Round::deal(3, 1, vec![card(7, 2), card(5, 1), card(6, 4)]);
        assert_eq!(round.members.iter().map(|m| m.first_rank).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(round.world(), 7);
        assert_eq!(round.node_rank(AgentId(5)), Some(1));
        assert_eq!(round.node_rank(AgentId(8)), None);
    }
}
