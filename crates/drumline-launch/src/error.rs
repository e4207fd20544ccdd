//! The errors of starting and controlling workers. A failing worker is not an error here: it is part of the
//! [`JobReport`](crate::JobReport).

use std::io;

use drumline_rendezvous::{InitError, KeyError, StoreError};

use crate::placing::PlacingError;
use crate::{EndpointError, Exit, LogError};

/// Why a job could not be started or controlled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A job with 0 processes was requested.
    #[error("a job needs at least one process, got 0; try nproc = 1")]
    NoProcesses,
    /// The program could not be executed.
    #[error("rank {rank}: cannot start `{program}`: {source}; {advice}")]
    Spawn {
        /// The rank that should run it.
        rank: usize,
        /// The program, as the user gave it.
        program: String,
        /// What the user can try.
        advice: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The job's store could not be set up.
    #[error("cannot host the job's store")]
    Store(#[source] StoreError),
    /// The control store of the nodes could not be reached.
    #[error("cannot meet the other nodes at {endpoint}")]
    Reach {
        /// Its address.
        endpoint: String,
        /// What went wrong.
        #[source]
        source: StoreError,
    },
    /// All ports that are derived from the Slurm step are in use.
    #[error(
        "cannot host the job's store: all ports derived from the Slurm step's number are in use by others ({addrs}); try a free one on all nodes: --nnodes (their number) --node-rank $SLURM_NODEID --master-addr (the first node) --master-port (the port)"
    )]
    PortsTaken {
        /// The addresses that were tried.
        addrs: String,
        /// The error of the last one.
        #[source]
        source: StoreError,
    },
    /// The agents of this machine cannot share a key.
    #[error(transparent)]
    UserKey(InitError),
    /// The workers' logs could not be created.
    #[error(transparent)]
    Logs(#[from] LogError),
    /// The rank is not part of this job.
    #[error("no rank {rank} among the {local} workers of this node")]
    NoSuchRank {
        /// The requested rank.
        rank: usize,
        /// How many workers there are.
        local: usize,
    },
    /// The rank has ended and cannot be signalled.
    #[error("rank {rank} has already ended ({exit})")]
    Ended {
        /// The requested rank.
        rank: usize,
        /// How it ended.
        exit: Exit,
    },
    /// A rank did not print the expected text.
    #[error("rank {rank} did not print `{needle}` {why}; it printed:\n{output}")]
    NoSuchLine {
        /// The rank.
        rank: usize,
        /// The expected text.
        needle: String,
        /// "in time" or "before it ended".
        why: &'static str,
        /// What it printed on stdout and stderr instead.
        output: String,
    },
    /// The requested port cannot be used.
    #[error("{}", port_message(*port, holder, source))]
    Port {
        /// The port.
        port: u16,
        /// The process that uses it, if that is known.
        holder: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another job uses the same address.
    #[error(
        "job `{theirs}` uses that address, and this job is `{ours}`; try the same --rdzv-id, or another port"
    )]
    OtherJob {
        /// The name of this job.
        ours: String,
        /// The name of the other job.
        theirs: String,
    },
    /// The workers cannot be bound to cores as requested.
    #[error(transparent)]
    Placing(#[from] PlacingError),
    /// The job's key is missing or invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The rendezvous endpoint is invalid.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

fn port_message(port: u16, holder: &str, source: &io::Error) -> String {
    if port == 0 {
        return format!(
            "cannot find a free port: {source}; try more open files (ulimit -n), or closing some"
        );
    }
    format!("cannot use port {port} on this machine: {source}{holder}; try another --master-port, or none")
}

impl LaunchError {
    /// For `map_err`: names the operation whose system call failed.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> LaunchError {
        move |source| LaunchError::System { what, source: source.into() }
    }
}
