//! What can go wrong in a group. The messages are written for the person who reads the log.

use std::time::Duration;

use crate::call::{Trace, call_site};
use crate::group::GroupName;
use crate::hint::hint;

/// This file, as `std::panic::Location` spells it.
const HERE: &str = file!();

/// Why a call on a group failed.
///
/// After most errors the group cannot be used any more: each later call returns the same error. The exceptions are
/// [`Invalid`](CommError::Invalid), [`Object`](CommError::Object), and [`System`](CommError::System) for a buffer that could
/// not be allocated: they reach all ranks, or concern this one only. [`Init`](CommError::Init) means that there is no group.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// An argument makes no sense; nothing was sent and the group can still be used.
    #[error("{what}")]
    Invalid {
        /// What is wrong, what was expected, what to do.
        what: String,
    },
    /// Ranks made different calls.
    #[error("ranks of group `{group}` made different calls:{}\ntry {}", list(group, calls), hint(calls))]
    Mismatch {
        /// The group.
        group: GroupName,
        /// Each rank and the call it made, in the order of ranks.
        calls: Vec<(usize, Trace)>,
    },
    /// Some ranks did not arrive in time.
    #[error(
        "{call} on group `{group}` timed out after {after:?}; missing:{}\ntry looking at what they do there, or a longer timeout \
         (DRUMLINE_TIMEOUT) if they only need more time",
        list(group, missing)
    )]
    Timeout {
        /// The group.
        group: GroupName,
        /// The call that waited.
        call: Trace,
        /// How long it waited.
        after: Duration,
        /// Each missing rank, and what is known about it.
        missing: Vec<(usize, MissingRank)>,
    },
    /// A rank's process ended.
    #[error("lost {} of group `{group}` ({host}, pid {pid}): {how}", group.rank(*rank))]
    PeerLost {
        /// The group.
        group: GroupName,
        /// The rank, counted in the whole job.
        rank: usize,
        /// Where it ran.
        host: String,
        /// Its process.
        pid: u32,
        /// Exit code or signal, as far as known.
        how: String,
    },
    /// A rank has left normally while other ranks still needed it.
    #[error(
        "{} has left group `{group}` (its process ended, or it dropped the group) and takes no part in {call}; try as many \
         steps on all ranks (a rank with less data ends earlier), or Ddp's uneven inputs",
        group.rank(*rank)
    )]
    PeerLeft {
        /// The group.
        group: GroupName,
        /// The rank, counted in the whole job.
        rank: usize,
        /// What it was needed for.
        call: Trace,
    },
    /// Another rank hit an error and called the group off.
    #[error("{} called off group `{group}`: {cause}", group.rank(*by))]
    CalledOff {
        /// The group.
        group: GroupName,
        /// The rank, counted in the whole job.
        by: usize,
        /// Its error.
        cause: String,
        /// Whether its error was recoverable.
        recoverable: bool,
    },
    /// The link to a rank broke or was never made.
    #[error("link to {} of group `{group}` failed during {call}: {cause}", group.rank(*rank))]
    Link {
        /// The group.
        group: GroupName,
        /// The rank, counted in the whole job.
        rank: usize,
        /// The call that used the link.
        call: Trace,
        /// What the system said.
        cause: String,
    },
    /// A message does not fit the receive it was meant for.
    #[error("{call} on group `{group}` met a message that does not fit: {} sent {got}", group.rank(*rank))]
    Message {
        /// The group.
        group: GroupName,
        /// The sender, counted in the whole job.
        rank: usize,
        /// The receive.
        call: Trace,
        /// What came.
        got: String,
    },
    /// The store has ended or did not answer.
    #[error("group `{group}` cannot continue without its store: {cause}")]
    Store {
        /// The group.
        group: GroupName,
        /// The store's error.
        cause: String,
    },
    /// The processes could not meet.
    #[error("cannot join the job: {cause}")]
    Init {
        /// Why.
        cause: String,
    },
    /// The system refused memory or a descriptor.
    #[error("{what} for group `{group}` failed: {cause}")]
    System {
        /// The group.
        group: GroupName,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: String,
    },
    /// An object could not be turned into bytes or back.
    #[error("{what} of an object failed: {cause}")]
    Object {
        /// What was tried.
        what: &'static str,
        /// Why.
        cause: String,
    },
}

impl CommError {
    /// Whether forming a new group may help. All other errors are mistakes in the program.
    pub fn is_recoverable(&self) -> bool {
        use CommError::{CalledOff, Init, Link, PeerLost, Store, Timeout};
        match self {
            CalledOff { recoverable, .. } => *recoverable,
            Timeout { .. } | PeerLost { .. } | Link { .. } | Store { .. } | Init { .. } => true,
            _ => false,
        }
    }

    /// An error about an argument of the current call. It names the place in the program where the call is made.
    #[track_caller]
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        let what = what.into();
        let site = call_site();
        // A place inside this library would not help its users.
        if site.file().starts_with(HERE.trim_end_matches("error.rs")) {
            return Self::Invalid { what };
        }
        Self::Invalid { what: format!("{what} (at {}:{})", site.file(), site.line()) }
    }
}

/// The same text as `Display`, since this is what `main` and `unwrap` show.
impl std::fmt::Debug for CommError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// What is known about a rank that did not arrive.
#[derive(Debug, Clone)]
pub struct MissingRank {
    /// Where it runs.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The last call it made, if that is known.
    pub last_call: Option<Trace>,
    /// What its process does. Known only for ranks of the same node.
    pub state: Option<ProcessState>,
}

/// What the process of a rank does, as the system reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessState {
    /// It runs, or waits for something.
    Alive,
    /// It was stopped by a signal or a debugger.
    Stopped,
    /// It has ended, and its parent has not noticed yet.
    Dead,
    /// It waits for a disk, and cannot be interrupted.
    WaitingForDisk,
    /// There is no such process any more.
    Ended,
}

impl std::fmt::Display for ProcessState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Alive => "alive",
            Self::Stopped => "stopped; try SIGCONT",
            Self::Dead => "dead",
            Self::WaitingForDisk => "waiting for a disk",
            Self::Ended => "no longer exists",
        })
    }
}

impl std::fmt::Display for MissingRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, pid {}", self.host, self.pid)?;
        if let Some(state) = &self.state {
            write!(f, ", {state}")?;
        }
        match &self.last_call {
            Some(call) if call.sequence == 0 => write!(f, ") which has made no call yet"),
            Some(call) => write!(f, ") whose last call was {call}"),
            None => write!(f, ") which did not report its last call"),
        }
    }
}

fn list<T: std::fmt::Display>(group: &GroupName, items: &[(usize, T)]) -> String {
    items.iter().map(|(rank, item)| format!("\n  {}: {item}", group.rank(*rank))).collect()
}
