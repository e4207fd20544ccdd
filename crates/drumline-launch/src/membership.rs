//! Decides which nodes take part in an elastic job (`--nnodes MIN:MAX`), without a clock and without a socket.
//!
//! # Terms
//!
//! - **agent**: the launcher on one node. Its identity is drawn at random at its start, so a restarted launcher is a
//!   new agent. It owns the node's workers (`slots` of them).
//! - **coordinator**: the role of the agent that hosts the store. Only the coordinator forms rounds. A job has one.
//! - **round**: one agreed membership, numbered from 1. Ranks are assigned in node order, `0..world`.
//! - **fence**: the highest round that an agent has promised never to run (again). Messages of a round at or below the
//!   fence are refused.
//! - **report**: the complete state of an agent, sent every `heartbeat` and at each change. The next report makes up
//!   for a lost one. A report that arrives after a newer one is dropped by its number.
//! - **order**: the coordinator's complete instruction to one agent: *hold* (run nothing up to this fence), *run* (this
//!   round) or *end*. It names the report that it answers.
//! - **host timeout**: how long a silent host is tolerated. The times below follow from it (`policy`).
//! - **lease**: an agent may let its workers run until `lease` after it **sent** the latest report that was answered.
//!   Shortly before (`patience`), it sends them SIGTERM. When the lease is over, it kills them, whatever else it knows.
//! - **eviction**: the coordinator removes an agent that has been silent for `evict_after`.
//! - **proof of death**: an agent's host refuses connections to the port on which the agent's process listened. The
//!   kernel there is alive and the process is not, so the host timeout need not pass. Its workers end within
//!   `kill_within`.
//!
//! # Why two rounds never run at once
//!
//! A new round begins only when every member of the last one has either reported "nothing runs here, and my fence is
//! up" or been evicted. The coordinator counts its `evict_after` from the moment a report *arrives*. The agent counts
//! its `lease` from the moment the same report was *sent*, which is earlier. Because
//! `lease + kill_within < evict_after`, the workers of an evicted agent are dead, even though no message could reach
//! it. An order that was delayed in the network names an old report, so the lease it grants is already over, and the
//! agent refuses it. Each side measures time spans on its own monotonic clock. Clocks of two machines are never
//! compared.
//!
//! Two things are required of the code that carries this out. The clock must keep running while the process is stopped
//! (`CLOCK_BOOTTIME` also runs while the machine sleeps). And **something that a SIGSTOP of the agent does not stop
//! must watch the end of the lease** ([`Agent::lease_end`]). A machine that wakes from sleep may let workers of an old
//! round run until that watch acts. Their frames carry the old round number, and the others refuse them.
//!
//! ```text
//!  coordinator                                             agent
//!
//!  Gathering ──MIN for last_call, or MAX──▶ Running        Idle ──run──▶ Running ──workers succeed───▶ Done
//!     ▲                                       │             ▲               │                           │
//!     │ all stopped or evicted                │ a member    │ stopped       │ hold, failure,            │ hold
//!     │ (a failure: one restart used)         │ fails, is   │               │ lease over                ▼
//!     │                                       │ lost, left, │               ▼                         Idle
//!  Closing ◀──────────────────────────────────┘ or came     └─────────── Stopping
//!     │
//!     └─▶ Over: success · out of restarts · crash loop · too few came · would not stop · host left
//!         (each agent gets this order, late ones too; then the coordinator may exit)
//! ```
//!
//! # When the store's host dies
//!
//! The surviving agents end, and report that cause: at once if the host's death is proved, else after the host timeout.
//! Their workers stop by the end of the lease. If the job could not take an agent back, the agent exits soon after
//! (`give_up_after`). Otherwise it waits for `join_timeout` for the network to return. Continuing the job on another
//! host would need a store that outlives its host. The place to add that is [`Order::coordinator`]: an agent obeys only
//! the coordinator that it met first, and a way to elect another one would change that one check.
//!
//! A worker that fails *because* another node died does not use a restart. The cause is decided only when all members
//! have stopped or are known to be missing, and a missing member is the cause.
//!
//! Not here: sockets, clocks, processes. The agent's loop carries out what is decided here.

mod agent;
mod coordinator;
mod decide;
mod message;
mod policy;
mod reason;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod simulator;

pub use agent::{Act, Agent, Event, Grace};
pub use coordinator::Coordinator;
pub use decide::{Decision, KnownAgent, Phase, State, decide};
pub use message::{
    AgentCard, AgentId, Doing, Instruction, MeetingPoint, Member, Order, Report, Round, WorkerFailure,
};
pub use policy::{BackOff, CrashLoop, HEARTBEAT, Policy, PolicyError, SHORTEST_HOST_TIMEOUT};
pub use reason::{Cause, Ending, Loss, Reason};
