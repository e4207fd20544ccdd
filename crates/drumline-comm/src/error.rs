//! What can go wrong in a group, in words for the person who reads the log.

use std::time::Duration;

use crate::call::{Trace, call_site};
use crate::group::GroupName;
use crate::hint::hint;

/// This file, as `std::panic::Location` spells it.
const HERE: &str = file!();

/// Why a call on a group failed.
///
/// After most of them the group is of no use: each later call gives the same error. Not so after
/// [`Invalid`](CommError::Invalid), [`Object`](CommError::Object), and [`System`](CommError::System) from a buffer that could
/// not be had, which are told to all ranks or concern this one only; and [`Init`](CommError::Init) means that there is no
/// group.
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
    /// Some ranks did not come in time.
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
        /// Each missing rank with what is known of it.
        missing: Vec<(usize, Silence)>,
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
    /// A rank has left in good order while others still wanted something of it.
    #[error(
        "{} has left group `{group}` (it ended, or let go of the group) and takes no part in {call}; try as many \
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
    /// Another rank ran into an error and called the group off.
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
        /// What was going on.
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
    /// The store is gone or did not answer.
    #[error("group `{group}` cannot go on without its store: {cause}")]
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
    /// Whether forming a new group may help; the others are mistakes in the program.
    pub fn is_recoverable(&self) -> bool {
        use CommError::{CalledOff, Init, Link, PeerLost, Store, Timeout};
        match self {
            CalledOff { recoverable, .. } => *recoverable,
            Timeout { .. } | PeerLost { .. } | Link { .. } | Store { .. } | Init { .. } => true,
            _ => false,
        }
    }

    /// An argument of the call that is being made makes no sense; says where in the program that call is.
    #[track_caller]
    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        let (what, site) = (what.into(), call_site());
        // A place in this library says nothing to those who use it.
        if site.file().starts_with(HERE.trim_end_matches("error.rs")) {
            return Self::Invalid { what };
        }
        Self::Invalid { what: format!("{what} (at {}:{})", site.file(), site.line()) }
    }
}

/// As for people: it is what `main` and `unwrap` show.
impl std::fmt::Debug for CommError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// What is known of a rank that did not come.
#[derive(Debug, Clone)]
pub struct Silence {
    /// Where it runs.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The last call it made, if that is known.
    pub last_call: Option<Trace>,
    /// What its process does: "alive", "stopped", "no longer exists", …; only for ranks of the same node.
    pub state: Option<String>,
}

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, pid {}", self.host, self.pid)?;
        if let Some(state) = &self.state {
            write!(f, ", {state}")?;
        }
        match &self.last_call {
            Some(call) if call.sequence == 0 => write!(f, ") which has made no call yet"),
            Some(call) => write!(f, ") whose last call was {call}"),
            None => write!(f, ") which did not say what it does"),
        }
    }
}

fn list<T: std::fmt::Display>(group: &GroupName, items: &[(usize, T)]) -> String {
    items.iter().map(|(rank, item)| format!("\n  {}: {item}", group.rank(*rank))).collect()
}
