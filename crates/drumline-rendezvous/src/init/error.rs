//! The errors of joining a job.

use super::meeting_file::MeetingFileError;
use super::method::MethodError;
use crate::job_key::KeyError;
use crate::node_list::NodeListError;
use crate::store::error::StoreError;

/// Why a process could not join its job.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// A required variable is not set.
    #[error("{variable} is not set; {advice}")]
    Missing {
        /// Its name.
        variable: &'static str,
        /// What the user can try.
        advice: String,
    },
    /// A variable is set but empty.
    #[error("{variable} is empty, expected {expected}; {advice}")]
    Empty {
        /// Its name.
        variable: String,
        /// What it should be.
        expected: &'static str,
        /// What the user can try.
        advice: &'static str,
    },
    /// A variable has an invalid value.
    #[error("{variable}={value} is not {expected}; {advice}")]
    Invalid {
        /// Its name.
        variable: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
        /// What the user can try.
        advice: &'static str,
    },
    /// Two values cannot both be right.
    #[error("{left} and {right} contradict each other: {why}; try correcting one of them")]
    Contradiction {
        /// One, as `NAME=value`.
        left: String,
        /// The other, as `NAME=value`.
        right: String,
        /// Why they contradict each other.
        why: &'static str,
    },
    /// The method is invalid.
    #[error("cannot join by {method:?}: {source}; try `env://`, `tcp://host:port` or `file:///path`")]
    Method {
        /// The method, as it was given.
        method: String,
        /// What is wrong with it.
        #[source]
        source: MethodError,
    },
    /// The node list is invalid.
    #[error("{variable}: {source}")]
    NodeList {
        /// Its variable.
        variable: &'static str,
        /// What is wrong with it.
        #[source]
        source: NodeListError,
    },
    /// The name of the store's host cannot be resolved.
    #[error("{given}: {source}")]
    Host {
        /// Where the name was given, as `NAME=value` or as the method.
        given: String,
        /// What happened.
        #[source]
        source: StoreError,
    },
    /// The meeting file is invalid.
    #[error("meeting file {path}: {source}")]
    MeetingFile {
        /// The file.
        path: String,
        /// What is wrong with it.
        #[source]
        source: MeetingFileError,
    },
    /// There is no folder in which rank 0 can leave a key for the ranks of this machine.
    #[error(
        "no job key was given, and rank 0 cannot leave one for the others: {why}; try XDG_RUNTIME_DIR=(a folder of yours with mode 700), or `drumline key new job.key` and DRUMLINE_JOB_KEY_FILE=job.key on all ranks"
    )]
    KeyFolder {
        /// Each folder, and what is wrong with it.
        why: String,
    },
    /// All ports that are derived from the job's number are in use.
    #[error(
        "all ports derived from the job's number are in use by others ({addrs}): {source}, the same on all ranks: MASTER_PORT=(a free one)"
    )]
    PortsTaken {
        /// The addresses that were tried.
        addrs: String,
        /// The error of the last one.
        #[source]
        source: StoreError,
    },
    /// The job key is missing or invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}
