//! What can go wrong in starting and steering workers. A worker that fails is not an error here: it is in the
//! [`JobReport`](crate::JobReport).

use std::io;

use drumline_rendezvous::{InitError, KeyError, StoreError};

use crate::placing::PlacingError;
use crate::{EndpointError, Exit, LogError};

/// Why a job could not be started or steered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A job of no processes was asked for.
    #[error("a job needs at least one process, got 0; try nproc = 1")]
    NoProcesses,
    /// The program could not be executed.
    #[error("rank {rank}: cannot start `{program}`: {source}; {advice}")]
    Spawn {
        /// The rank that was to run it.
        rank: usize,
        /// The program as it was given.
        program: String,
        /// What to do about it.
        advice: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The job's store could not be set up.
    #[error("cannot host the job's store")]
    Store(#[source] StoreError),
    /// The store in which the nodes meet could not be reached.
    #[error("cannot meet the other nodes at {endpoint}")]
    Reach {
        /// Where.
        endpoint: String,
        /// What went wrong.
        #[source]
        source: StoreError,
    },
    /// Others have all ports that follow from the Slurm step.
    #[error(
        "cannot host the job's store: others have all ports that follow from the number of the Slurm step ({addrs}); try a free one on all nodes: --nnodes (their number) --node-rank $SLURM_NODEID --master-addr (the first node) --master-port (the port)"
    )]
    PortsTaken {
        /// Those that were tried.
        addrs: String,
        /// What happened at the last one.
        #[source]
        source: StoreError,
    },
    /// The agents of this machine cannot share a key.
    #[error(transparent)]
    UserKey(InitError),
    /// The workers' logs could not be made.
    #[error(transparent)]
    Logs(#[from] LogError),
    /// The rank is not one of this job's.
    #[error("no rank {rank} among the {local} workers of this node")]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// How many workers there are.
        local: usize,
    },
    /// The rank cannot be signalled any more.
    #[error("rank {rank} has already ended ({exit})")]
    Ended {
        /// The rank asked for.
        rank: usize,
        /// How it ended.
        exit: Exit,
    },
    /// A rank did not print what was waited for.
    #[error("rank {rank} did not print `{needle}` {why}; it printed:\n{output}")]
    NoSuchLine {
        /// The rank watched.
        rank: usize,
        /// The text waited for.
        needle: String,
        /// "in time" or "before it ended".
        why: &'static str,
        /// What it printed on stdout and stderr instead.
        output: String,
    },
    /// The port that was asked for cannot be had.
    #[error("{}", port_words(*port, holder, source))]
    Port {
        /// The port.
        port: u16,
        /// Who has it, where that can be known.
        holder: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Another job meets at the same address.
    #[error(
        "job `{theirs}` meets at that address, this is `{ours}`; try the same --rdzv-id, or another port"
    )]
    OtherJob {
        /// Our name.
        ours: String,
        /// The name of those who are there.
        theirs: String,
    },
    /// The workers cannot be placed on cores as was asked.
    #[error(transparent)]
    Placing(#[from] PlacingError),
    /// The job's key cannot be had.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The address at which the nodes meet is none.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

fn port_words(port: u16, holder: &str, source: &io::Error) -> String {
    match port {
        0 => format!("cannot find a free port: {source}; try more open files (ulimit -n), or closing some"),
        _ => format!(
            "cannot have port {port} on this machine: {source}{holder}; try another --master-port, or none"
        ),
    }
}

impl LaunchError {
    /// For `map_err`: names what was being done when a system call failed.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> LaunchError {
        move |source| LaunchError::System { what, source: source.into() }
    }
}
