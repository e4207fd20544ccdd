//! Who takes part in an elastic job (`--nnodes MIN:MAX`), decided without a clock and without a socket.
//!
//! # Words
//!
//! - **agent**: the launcher on one node. Its identity is drawn at random at its start, so that a launcher
//!   started again is another agent. It owns the node's workers (`slots` of them).
//! - **coordinator**: the role of the agent that hosts the store. It alone forms rounds. There is one per job.
//! - **round**: one agreed membership, numbered from 1. Ranks are dealt out in node order, `0..world`.
//! - **fence**: the highest round that an agent has promised never to run (again). What comes from a round at
//!   or below the fence is refused.
//! - **report**: all that an agent has to say, said whole every `heartbeat` and at each change. A lost report is
//!   made up for by the next one; one that arrives late, after a newer one, is dropped by its number.
//! - **order**: all that the coordinator wants of one agent: *hold* (run nothing up to this fence), *run* (this
//!   round) or *end*. It names the report it answers.
//! - **host timeout**: how long nothing happens although a host is silent. The times below follow from it (`policy`).
//! - **lease**: an agent may let workers run until `lease` after it **sent** the latest report that was answered.
//!   Shortly before (`patience`) it sends them SIGTERM; when the lease is over, it kills them, whatever else it knows.
//! - **eviction**: an agent not heard for `evict_after` is no longer counted on.
//! - **proof of death**: an agent's host refuses connections to the port on which the agent's process listened. The kernel
//!   there is alive and the process is not, so that nobody waits for the host timeout; its workers end within `kill_within`.
//!
//! # Why no two rounds run at once
//!
//! A new round begins only when every member of the last one has either said "nothing runs here, and my fence
//! is up" or been evicted. The coordinator counts its `evict_after` from the moment a report *arrives*; the agent
//! counts its `lease` from the moment the same report was *sent*, which is earlier. As
//! `lease + kill_within < evict_after`, an evicted agent's workers are dead, although nobody could tell it to
//! stop. An order that sat in the network for long names an old report, grants a lease that is over, and is refused.
//! Only spans of one's own monotonic clock are used; clocks of two machines are never compared.
//!
//! What is asked of those who act: the clock must go on while the process is stopped (`CLOCK_BOOTTIME` also does while
//! the machine sleeps), and **the end of the lease must be watched by something that a SIGSTOP of the agent
//! does not stop** ([`Agent::lease_end`]). A machine that wakes from a pause may let workers of
//! an old round run until that watch acts; their frames bear the old round and are refused by the others.
//!
//! ```text
//!  coordinator                                             agent
//!
//!  Gathering ──MIN for last_call, or MAX──▶ Running        Idle ──run──▶ Running ──workers end well──▶ Done
//!     ▲                                       │             ▲               │                           │
//!     │ all stopped or evicted                │ a member    │ stopped       │ hold, failure,            │ hold
//!     │ (a failure: one restart used)         │ fails, is   │               │ lease over                ▼
//!     │                                       │ lost, left, │               ▼                         Idle
//!  Closing ◀──────────────────────────────────┘ or came     └─────────── Stopping
//!     │
//!     └─▶ Over: success · out of restarts · crash loop · too few came · would not stop · host left
//!         (each agent is told, late ones too; then the coordinator may go)
//! ```
//!
//! # When the store's host dies
//!
//! The survivors end, with that cause: at once if its death is proved, else after the host timeout. Their workers stop
//! by the end of the lease. The agent leaves soon after (`give_up_after`) if the job could not take it back, and otherwise
//! waits for `join_timeout` for the network to return. Forming the job anew elsewhere would need a store that outlives its host. The
//! seam for it is [`Order::coordinator`]: an agent obeys only the coordinator that it first met, and whoever
//! teaches the survivors to choose another one changes that one check.
//!
//! A worker that fails *because* another node died is not held against the job: the cause is judged only when all
//! members have stopped or been found missing, and a missing one is the cause.
//!
//! Not here: sockets, clocks, processes; what `decide` said is carried out by the agent's loop.

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
pub use decide::{Decision, Known, Phase, State, decide};
pub use message::{AgentCard, AgentId, Doing, Door, Member, Order, Report, Round, Wish, WorkerFailure};
pub use policy::{BackOff, CrashLoop, HEARTBEAT, Policy, PolicyError, SHORTEST_HOST_TIMEOUT};
pub use reason::{Cause, Ending, Loss, Reason};
