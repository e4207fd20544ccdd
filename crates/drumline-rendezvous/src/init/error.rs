//! What can go wrong before the members have met.

use crate::job_key::KeyError;
use crate::node_list::NodeListError;
use crate::store::error::StoreError;

/// Why a process could not join its job.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// A variable is needed and not there.
    #[error("{variable} is not set; {advice}")]
    Missing {
        /// Its name.
        variable: &'static str,
        /// What to do.
        advice: String,
    },
    /// A variable is there and says nothing.
    #[error("{variable} is empty, expected {expected}; {advice}")]
    Empty {
        /// Its name.
        variable: String,
        /// What it should be.
        expected: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A variable cannot be what it says.
    #[error("{variable}={value} is not {expected}; {advice}")]
    Invalid {
        /// Its name.
        variable: String,
        /// What it says.
        value: String,
        /// What it should be.
        expected: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// Two values cannot both be right.
    #[error("{left} and {right} contradict each other: {why}; try correcting one of them")]
    Contradiction {
        /// One, as `NAME=value`.
        left: String,
        /// The other, as `NAME=value`.
        right: String,
        /// Why not.
        why: &'static str,
    },
    /// The method cannot be read.
    #[error("cannot meet by {method:?}: {reason}; try `env://`, `tcp://host:port` or `file:///path`")]
    Method {
        /// What was given.
        method: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The node list cannot be read.
    #[error("{variable}: {source}")]
    NodeList {
        /// Its variable.
        variable: &'static str,
        /// What is wrong with it.
        #[source]
        source: NodeListError,
    },
    /// Nobody knows the name of the store's host.
    #[error("{given}: {source}")]
    Host {
        /// Where the name was given, as `NAME=value` or as the method.
        given: String,
        /// What happened.
        #[source]
        source: StoreError,
    },
    /// The meeting file says what cannot be right.
    #[error("meeting file {path}: {reason}")]
    MeetingFile {
        /// The file.
        path: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The key of a job on one machine can be left nowhere.
    #[error(
        "no job key was given, and rank 0 can leave none for the others: {why}; try XDG_RUNTIME_DIR=(a folder of yours with mode 700), or `drumline key new job.key` and DRUMLINE_JOB_KEY_FILE=job.key on all ranks"
    )]
    KeyFolder {
        /// Each place, and what is wrong with it.
        why: String,
    },
    /// Others have all ports that follow from the job's number.
    #[error(
        "others have all ports that follow from the job's number ({addrs}): {source}, the same on all ranks: MASTER_PORT=(a free one)"
    )]
    PortsTaken {
        /// Those that were tried.
        addrs: String,
        /// What happened at the last one.
        #[source]
        source: StoreError,
    },
    /// The job key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}
