//! Why something was decided: the same words in the log, in the report and in tests.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

use super::message::WorkerFailure;
use crate::Signal;
use crate::report::signal_name;

/// A rank that ran for less has hardly begun: the same as a crash loop's by default.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Why a running round is closed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A worker failed. Uses a restart, unless a member turns out to be lost.
    Failed(WorkerFailure),
    /// The agent on this host is gone.
    Lost {
        /// Its host.
        host: String,
        /// How.
        how: Loss,
    },
    /// The agent on this host stopped its workers because it had lost contact.
    FellOut(String),
    /// The agent on this host was asked to leave.
    Left(String),
    /// The agent on this host came.
    Came(String),
}

/// How an agent was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    /// Nothing was heard from it for so long.
    Silent(Duration),
    /// Its host answers, and says that the process has ended.
    Died,
    /// It said that it ends.
    Ended,
}

/// Why a decision was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Fewer agents than the least number have come.
    TooFew {
        /// Hosts that came.
        came: Vec<String>,
        /// How many are needed.
        min: usize,
    },
    /// A member is gone, and fewer are left than the least number.
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
    /// Another node has the place among the nodes that was given to this one.
    NodeRankTaken {
        /// The place.
        node_rank: usize,
        /// The other node's host.
        host: String,
    },
    /// The nodes were told different numbers of nodes.
    OtherNodes {
        /// What this one was told.
        told: (usize, usize),
        /// What the store's host was told.
        agreed: (usize, usize),
    },
    /// The nodes would wait for a silent host for different times.
    OtherHostTimeout {
        /// How long this one would.
        told: Duration,
        /// How long the store's host would.
        agreed: Duration,
    },
    /// Enough have come; more are waited for.
    LastCall {
        /// How many came.
        came: usize,
        /// How many there may be.
        max: usize,
    },
    /// The round has all the nodes it is going to get.
    Complete {
        /// How many nodes.
        nodes: usize,
    },
    /// A pause before the next restart.
    BackOff(Duration),
    /// The round runs.
    Runs {
        /// Its number.
        round: u64,
    },
    /// The round has its most nodes; this agent waits as a spare.
    Spare,
    /// The round is being closed.
    Closing(Cause),
    /// All members of the closed round have stopped.
    Stopped(Cause),
    /// The agent was not heard for too long.
    Silent {
        /// Its host.
        host: String,
        /// For how long.
        span: Duration,
    },
    /// The agent's process has ended, as its host says.
    Died {
        /// Its host.
        host: String,
    },
    /// All workers of the round ended well.
    AllDone,
    /// A worker failed, and no restart is left.
    OutOfRestarts {
        /// The failure.
        failure: WorkerFailure,
        /// How many restarts there were.
        max_restarts: usize,
    },
    /// The same rank failed quickly, again and again.
    CrashLoop {
        /// The last failure.
        failure: WorkerFailure,
        /// How many in a row.
        times: usize,
    },
    /// An agent did not get its workers to stop.
    WouldNotStop {
        /// Its host.
        host: String,
        /// How long was waited.
        span: Duration,
    },
    /// The agent that hosts the store was asked to leave.
    StoreHostLeft {
        /// The signal that asked it; the workers of all nodes get the same.
        signal: i32,
    },
    /// The store's host is dead or cut off.
    StoreLost {
        /// For how long there was no contact.
        span: Duration,
    },
    /// The process of the agent that hosts the store has ended, as its host says.
    StoreDied,
    /// The lease ran out without contact.
    LeaseOver,
    /// This agent was asked to leave.
    AskedToLeave,
    /// The job, or this agent's part in it, is over.
    JobOver(Box<Ending>),
    /// All agents know that the job is over, or cannot be reached.
    EveryoneTold,
    /// Nothing to do.
    Quiet,
}

/// How the job, or an agent's part in it, ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// All workers of the last round ended well.
    Success,
    /// The job failed.
    Failure(Reason),
    /// This agent left as it was asked to.
    Left,
}

impl Reason {
    /// The signal with which workers are stopped for this reason, if it is a certain one.
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

    /// Whether it is that an agent was asked to leave, on whatever node.
    pub fn is_departure(&self) -> bool {
        match self {
            Reason::Closing(cause)
            | Reason::TooFewLeft { cause, .. }
            | Reason::NoRestartLeft { cause, .. } => matches!(cause, Cause::Left(_)),
            Reason::JobOver(ending) => matches!(&**ending, Ending::Failure(why) if why.is_departure()),
            _ => false,
        }
    }

    /// Whether it is that a worker failed, on whatever node.
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
            Cause::Came(host) => write!(f, "an agent came on {host}"),
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
            Reason::TooFew { came, min } if came.is_empty() => write!(f, "none of {min} nodes came"),
            Reason::TooFew { came, min } => {
                write!(f, "only {} of at least {min} nodes came: {}", came.len(), came.join(", "))
            }
            Reason::TooFewLeft { cause, left, min } => write!(
                f,
                "{cause}; {left} of at least {min} nodes are left; \
                 try --nnodes MIN:MAX to go on with fewer, or --max-restarts to wait for its return"
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
                write!(f, "the node on {host} has --node-rank {node_rank} too; try another one for each node")
            }
            Reason::OtherNodes { told, agreed } => write!(
                f,
                "this node has --nnodes {}:{} and the first one {}:{}; try the same on all nodes",
                told.0, told.1, agreed.0, agreed.1
            ),
            Reason::OtherHostTimeout { told, agreed } => write!(
                f,
                "this node has --host-timeout {told:?} and the first one {agreed:?}; try the same on all nodes"
            ),
            Reason::LastCall { came, max } => write!(f, "{came} nodes came; waiting for up to {max}"),
            Reason::Complete { nodes } => write!(f, "{nodes} nodes take part"),
            Reason::BackOff(pause) => write!(f, "pausing {pause:.1?} before the next restart"),
            Reason::Runs { round } => write!(f, "round {round} runs"),
            Reason::Spare => write!(f, "the round has its most nodes; waiting as a spare"),
            Reason::Closing(cause) => write!(f, "stopping the round: {cause}"),
            Reason::Stopped(cause) => write!(f, "the round has stopped: {cause}"),
            Reason::Silent { host, span } => write!(f, "the agent on {host} was silent for {span:.1?}"),
            Reason::Died { host } => write!(f, "the agent on {host} has died"),
            Reason::AllDone => write!(f, "all workers ended well"),
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
            Reason::StoreDied => write!(f, "the agent that hosts the store has died"),
            Reason::LeaseOver => write!(f, "the lease ran out without contact"),
            Reason::AskedToLeave => write!(f, "this agent was asked to leave"),
            Reason::JobOver(ending) => write!(f, "{ending}"),
            Reason::EveryoneTold => write!(f, "all agents know that the job is over"),
            Reason::Quiet => write!(f, "nothing to do"),
        }
    }
}

/// A rank that failed at once will do so again: then restarts are not what the job lacks.
fn after_restarts(failure: &WorkerFailure) -> &'static str {
    match failure.ran_for < AT_ONCE {
        true => "more restarts will hardly help; try what its error says",
        false => "try a larger --max-restarts",
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
