//! Why something was decided. The log, the failure report and the tests all use the same text.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

use super::message::WorkerFailure;
use crate::Signal;
use crate::report::signal_name;

/// A rank that failed within this time failed at once. Equal to the default of a crash loop.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Why a running round is closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A worker failed. Uses a restart, unless a member turns out to be lost.
    Failed(WorkerFailure),
    /// The agent on this host was lost.
    Lost {
        /// Its host.
        host: String,
        /// How it was lost.
        how: Loss,
    },
    /// The agent on this host stopped its workers because it had lost contact.
    FellOut(String),
    /// The agent on this host was asked to leave.
    Left(String),
    /// A new agent on this host wants to join.
    Came(String),
}

/// How an agent was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    /// It was silent for this long.
    Silent(Duration),
    /// Its host answers, and refuses connections to the process: it has ended.
    Died,
    /// It reported that it ends.
    Ended,
}

/// Why a decision was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Fewer agents than the minimum have joined.
    TooFew {
        /// The hosts of those that have joined.
        came: Vec<String>,
        /// How many are needed.
        min: usize,
    },
    /// A member is gone, and fewer nodes than the minimum are left.
    TooFewLeft {
        /// Who, and how.
        cause: Cause,
        /// How many are left.
        left: usize,
        /// How many are needed.
        min: usize,
    },
    /// A node lost contact for too long, and no restart is left.
    NoRestartLeft {
        /// Who, and how.
        cause: Cause,
        /// How many restarts there were.
        max_restarts: usize,
    },
    /// Another node has the same node rank as this one.
    NodeRankTaken {
        /// The node rank.
        node_rank: usize,
        /// The other node's host.
        host: String,
    },
    /// The nodes were started with different `--nnodes`.
    OtherNodes {
        /// The minimum and maximum that this node was started with.
        given: (usize, usize),
        /// Those of the store's host.
        agreed: (usize, usize),
    },
    /// The nodes were started with different `--host-timeout`.
    OtherHostTimeout {
        /// The timeout that this node was started with.
        given: Duration,
        /// The timeout of the store's host.
        agreed: Duration,
    },
    /// Enough nodes have joined; the coordinator waits a little for more.
    LastCall {
        /// How many have joined.
        came: usize,
        /// How many there may be.
        max: usize,
    },
    /// The round's nodes are chosen.
    Complete {
        /// How many nodes.
        nodes: usize,
    },
    /// The coordinator pauses before the next restart.
    BackOff(Duration),
    /// The round runs.
    Runs {
        /// Its number.
        round: u64,
    },
    /// The round has the maximum number of nodes; this agent waits as a spare.
    Spare,
    /// The round is being closed.
    Closing(Cause),
    /// All members of the closed round have stopped.
    Stopped(Cause),
    /// The agent was silent for too long.
    Silent {
        /// Its host.
        host: String,
        /// For how long.
        span: Duration,
    },
    /// It is proved that the agent's process has ended.
    Died {
        /// Its host.
        host: String,
    },
    /// All workers of the round succeeded.
    AllDone,
    /// A worker failed, and no restart is left.
    OutOfRestarts {
        /// The failure.
        failure: WorkerFailure,
        /// How many restarts there were.
        max_restarts: usize,
    },
    /// The same rank failed quickly several times in a row.
    CrashLoop {
        /// The last failure.
        failure: WorkerFailure,
        /// How many in a row.
        times: usize,
    },
    /// An agent could not stop its workers in time.
    WouldNotStop {
        /// Its host.
        host: String,
        /// How long the coordinator waited.
        span: Duration,
    },
    /// The agent that hosts the store was asked to leave.
    StoreHostLeft {
        /// The signal that asked it. The workers of all nodes get the same signal.
        signal: i32,
    },
    /// The store's host is dead or cut off.
    StoreLost {
        /// How long there was no contact.
        span: Duration,
    },
    /// It is proved that the process of the agent that hosts the store has ended.
    StoreDied,
    /// The lease ran out without contact.
    LeaseOver,
    /// This agent was asked to leave.
    AskedToLeave,
    /// The job, or this agent's part in it, is over.
    JobOver(Box<Ending>),
    /// All agents know that the job is over, or cannot be reached.
    #[serde(rename = "EveryoneTold")]
    AllInformed,
    /// Nothing to do.
    Quiet,
}

/// How the job, or an agent's part in it, ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// All workers of the last round succeeded.
    Success,
    /// The job failed.
    Failure(Reason),
    /// This agent left because it was asked to.
    Left,
}

impl Reason {
    /// The signal with which workers are stopped for this reason, if the reason determines one.
    pub fn signal(&self) -> Option<Signal> {
        match self {
            Reason::JobOver(ending) => match &**ending {
                Ending::Failure(why) => why.signal(),
                Ending::Success | Ending::Left => None,
            },
            Reason::StoreHostLeft { signal } => Signal::from_named_raw(*signal),
            _ => None,
        }
    }

    /// Whether the reason is that an agent was asked to leave, on any node.
    pub fn is_departure(&self) -> bool {
        match self {
            Reason::Closing(cause)
            | Reason::TooFewLeft { cause, .. }
            | Reason::NoRestartLeft { cause, .. } => matches!(cause, Cause::Left(_)),
            Reason::JobOver(ending) => matches!(&**ending, Ending::Failure(why) if why.is_departure()),
            _ => false,
        }
    }

    /// Whether the reason is that a worker failed, on any node.
    pub fn is_failure(&self) -> bool {
        match self {
            Reason::Closing(cause)
            | Reason::TooFewLeft { cause, .. }
            | Reason::NoRestartLeft { cause, .. } => matches!(cause, Cause::Failed(_)),
            Reason::OutOfRestarts { .. } | Reason::CrashLoop { .. } => true,
            Reason::JobOver(ending) => matches!(&**ending, Ending::Failure(why) if why.is_failure()),
            _ => false,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Failed(failure) => write!(f, "{failure}"),
            Cause::Lost { host, how } => write!(f, "lost the agent on {host}: {how}"),
            Cause::FellOut(host) => {
                write!(
                    f,
                    "the agent on {host} had no contact for longer than --host-timeout and stopped its ranks"
                )
            }
            Cause::Left(host) => write!(f, "the agent on {host} leaves"),
            Cause::Came(host) => write!(f, "a new agent joins on {host}"),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Silent(span) => write!(f, "its host was silent for {span:.1?}"),
            Loss::Died => write!(f, "its process has died"),
            Loss::Ended => write!(f, "it has ended"),
        }
    }
}

impl fmt::Display for WorkerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerFailure { rank, host, ran_for, what, .. } = self;
        write!(f, "rank {rank} on host {host} failed after {:.3} s: {what}", ran_for.as_secs_f64())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::TooFew { came, min } if came.is_empty() => write!(f, "none of {min} nodes joined"),
            Reason::TooFew { came, min } => {
                write!(f, "only {} of at least {min} nodes joined: {}", came.len(), came.join(", "))
            }
            Reason::TooFewLeft { cause, left, min } => write!(
                f,
                "{cause}; {left} of at least {min} nodes are left; \
                 try --nnodes MIN:MAX to continue with fewer, or --max-restarts to wait for its return"
            ),
            Reason::NoRestartLeft { cause, max_restarts: 0 } => {
                write!(f, "{cause}; try a longer --host-timeout, or --max-restarts to start all ranks again")
            }
            Reason::NoRestartLeft { cause, max_restarts } => write!(
                f,
                "{cause}; all {max_restarts} restarts are used; \
                 try a longer --host-timeout, or a larger --max-restarts"
            ),
            Reason::NodeRankTaken { node_rank, host } => {
                write!(
                    f,
                    "the node on {host} also has --node-rank {node_rank}; try a different one on each node"
                )
            }
            Reason::OtherNodes { given, agreed } => write!(
                f,
                "this node has --nnodes {}:{} and the first one {}:{}; try the same on all nodes",
                given.0, given.1, agreed.0, agreed.1
            ),
            Reason::OtherHostTimeout { given, agreed } => write!(
                f,
                "this node has --host-timeout {given:?} and the first one {agreed:?}; try the same on all nodes"
            ),
            Reason::LastCall { came, max } => write!(f, "{came} nodes joined; waiting for up to {max}"),
            Reason::Complete { nodes } => write!(f, "{nodes} nodes take part"),
            Reason::BackOff(pause) => write!(f, "pausing {pause:.1?} before the next restart"),
            Reason::Runs { round } => write!(f, "round {round} runs"),
            Reason::Spare => write!(f, "the round has the maximum number of nodes; waiting as a spare"),
            Reason::Closing(cause) => write!(f, "stopping the round: {cause}"),
            Reason::Stopped(cause) => write!(f, "the round has stopped: {cause}"),
            Reason::Silent { host, span } => write!(f, "the agent on {host} was silent for {span:.1?}"),
            Reason::Died { host } => write!(f, "the agent on {host} has died"),
            Reason::AllDone => write!(f, "all workers succeeded"),
            Reason::OutOfRestarts { failure, max_restarts: 0 } => write!(f, "{failure}"),
            Reason::OutOfRestarts { failure, max_restarts } => {
                write!(f, "{failure}; all {max_restarts} restarts are used; {}", after_restarts(failure))
            }
            Reason::CrashLoop { failure, times } => {
                write!(
                    f,
                    "{failure}; the rank failed at once {times} times in a row; {}",
                    after_restarts(failure)
                )
            }
            Reason::WouldNotStop { host, span } => {
                write!(f, "the agent on {host} did not stop its workers within {span:.1?}")
            }
            Reason::StoreHostLeft { signal } => {
                write!(f, "the agent that hosts the store was stopped by {}", signal_name(*signal))
            }
            Reason::StoreLost { span } => {
                write!(f, "no contact with the store's host for {span:.1?}: it is dead or cut off")
            }
            Reason::StoreDied => write!(f, "the agent that hosts the store has ended or died"),
            Reason::LeaseOver => write!(f, "the lease ran out without contact"),
            Reason::AskedToLeave => write!(f, "this agent was asked to leave"),
            Reason::JobOver(ending) => write!(f, "{ending}"),
            Reason::AllInformed => write!(f, "all agents know that the job is over"),
            Reason::Quiet => write!(f, "nothing to do"),
        }
    }
}

/// What to try when the restarts are used up. A rank that failed at once would fail again.
fn after_restarts(failure: &WorkerFailure) -> &'static str {
    if failure.ran_for < AT_ONCE {
        "more restarts will hardly help; try what its error says"
    } else {
        "try a larger --max-restarts"
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Success => write!(f, "the job succeeded"),
            Ending::Failure(reason) => write!(f, "the job failed: {reason}"),
            Ending::Left => write!(f, "this agent left the job"),
        }
    }
}
