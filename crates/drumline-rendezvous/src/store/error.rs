//! The errors of a store.

use crate::frame::FrameError;
use crate::handshake::HandshakeError;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Why a store could not be reached or did not carry out a request.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed first.
    #[error(
        "{what} timed out after {after:.1?}: no rank provided it; try looking at the ranks that should have"
    )]
    Timeout {
        /// The request, with those of its keys that are missing.
        what: String,
        /// How long the request waited.
        after: Duration,
    },
    /// The store could not carry out the request.
    #[error("the store rejected the request: {reason}")]
    Rejected {
        /// Why.
        reason: String,
    },
    /// A key or value is beyond a limit.
    #[error("{what} may have {limit} bytes, got {bytes}; try splitting it over several keys")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The most allowed.
        limit: usize,
    },
    /// The server is gone, or ended this connection.
    #[error(
        "lost the store at {addr} during {what} ({source}); its host (rank 0 or the launcher) has ended or cannot be reached"
    )]
    Gone {
        /// Its address.
        addr: String,
        /// The request.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The server answered before and does not answer any more.
    #[error(
        "the store at {addr} did not answer for {after:.1?} during {what}: its host (rank 0 or the launcher) is frozen or cannot be reached; try looking at that host, or a longer DRUMLINE_HOST_TIMEOUT if network outages may last that long"
    )]
    Silent {
        /// Its address.
        addr: String,
        /// The request.
        what: String,
        /// How long nothing was received.
        after: Duration,
    },
    /// No store answered before the deadline.
    #[error(
        "no store at {addr} after {after:.1?}: {tried}; try checking that rank 0 (or the launcher) runs and that MASTER_ADDR and MASTER_PORT are the same on all ranks"
    )]
    Unreachable {
        /// The address that was tried.
        addr: String,
        /// How long the attempts took.
        after: Duration,
        /// Each address, and the last result there.
        tried: Tried,
    },
    /// No server proved the job key on any of the ports that are derived from the job's number.
    #[error(
        "no store of this job on {host} after {after:.1?}: {tried}; try checking that rank 0 (or the launcher) runs and has the same job key, or a free port of that host on all ranks (MASTER_PORT, or --master-port of `drumline run`)"
    )]
    NotOnAnyPort {
        /// The host that was tried.
        host: String,
        /// How long the attempts took.
        after: Duration,
        /// Each address, and the last result there.
        tried: Tried,
    },
    /// The host's name cannot be resolved.
    #[error(
        "the name `{host}` cannot be resolved, tried for {after:.1?}: {source}; try an address, or a name that this machine knows (`getent hosts {host}`)"
    )]
    Unresolved {
        /// The name.
        host: String,
        /// How long the attempts took.
        after: Duration,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A server answered, and the handshake failed.
    #[error("cannot join the store at {addr}: {source}")]
    Handshake {
        /// The address.
        addr: String,
        /// Why it failed.
        #[source]
        source: HandshakeError,
    },
    /// The other side violates the protocol.
    #[error("the store at {addr} sent an invalid reply: {source}")]
    Protocol {
        /// The address.
        addr: String,
        /// What is wrong with the reply.
        #[source]
        source: FrameError,
    },
    /// Without a secret key, only loopback addresses are allowed.
    #[error(
        "no job key was given, so only loopback may be used and {addr} is not; try `drumline key new job.key` once, copy it to every machine, and DRUMLINE_JOB_KEY_FILE=job.key on all ranks"
    )]
    NeedsSecret {
        /// The requested address.
        addr: String,
    },
    /// The server cannot listen on its address.
    #[error("cannot listen on {addr}: {source}; {advice}")]
    Bind {
        /// The requested address.
        addr: String,
        /// What the user can try.
        advice: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file belongs to another run.
    #[error("{} belongs to another run (`{run}`, written by process {pid} on {host}); if that run has ended, try removing the file", path.display())]
    StaleFile {
        /// The file.
        path: PathBuf,
        /// The run that wrote it.
        run: String,
        /// Host that wrote it.
        host: String,
        /// Process that wrote it.
        pid: u32,
    },
    /// The file is not a store file, or is damaged.
    #[error("{} is not a valid store file: {source}; try another path, or removing the file", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: BadFileError,
    },
    /// A server was given no address to listen on.
    #[error("the store's server was given no address to listen on")]
    NoAddress,
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Why a file is not a valid store file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadFileError {
    /// It has another owner, or others may access it.
    #[error("expected a file of user {expected} with mode 0600, got user {owner}, {mode:04o}")]
    NotPrivate {
        /// The user of this process.
        expected: u32,
        /// The file's owner.
        owner: u32,
        /// The file's permission bits.
        mode: u32,
    },
    /// It ends inside its header.
    #[error("it ends inside its header")]
    Short,
    /// It does not begin with the magic bytes.
    #[error("it does not begin with the magic bytes of one")]
    Magic,
    /// It has a version that this program does not know.
    #[error("it has version {got}, this program knows {expected}")]
    Version {
        /// The version in the file.
        got: u16,
        /// The version that this program knows.
        expected: u16,
    },
    /// Its header is not valid JSON.
    #[error("its header is invalid: {0}")]
    Header(String),
    /// The records are not numbered in order.
    #[error("record {expected} has number {got}")]
    Order {
        /// The number that was due.
        expected: u64,
        /// The number in the file.
        got: u64,
    },
    /// A record is not a request.
    #[error("record {0} is not a request")]
    NotARequest(u64),
    /// A record cannot be decoded.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

impl StoreError {
    /// Whether the only problem is that the deadline passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// Whether a new round of the job may succeed; the other errors are mistakes in the program or its configuration.
    pub fn is_recoverable(&self) -> bool {
        matches!(
            self,
            Self::Timeout { .. }
                | Self::Gone { .. }
                | Self::Silent { .. }
                | Self::Unreachable { .. }
                | Self::NotOnAnyPort { .. }
        )
    }

    /// Whether another process already listens on the server's address.
    pub fn is_port_taken(&self) -> bool {
        matches!(self, Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }

    /// Changes the time of a timeout to the time since `began`, for a caller that waited in several calls. Other errors
    /// stay unchanged.
    ///
    /// ```
    /// use drumline_rendezvous::{MemoryStore, Store, StoreError};
    /// use std::time::{Duration, Instant};
    /// let (store, began) = (MemoryStore::new(), Instant::now());
    /// let slice = || store.wait(&["never"], Instant::now() + Duration::from_millis(20)).unwrap_err();
    /// slice();
    /// let error = slice().waited_since(began);
    /// assert!(matches!(error, StoreError::Timeout { after, .. } if after >= Duration::from_millis(40)));
    /// ```
    #[must_use]
    pub fn waited_since(self, began: Instant) -> StoreError {
        match self {
            Self::Timeout { what, .. } => Self::Timeout { what, after: began.elapsed() },
            other => other,
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
        let what = what.into();
        move |source| StoreError::Io { what, source }
    }
}

/// The last result at each address that was tried.
#[derive(Debug, Default, Clone)]
pub struct Tried(Vec<(String, String, u32)>);

impl Tried {
    /// Records one more attempt at `addr`.
    pub(crate) fn note(&mut self, addr: String, outcome: String) {
        match self.0.iter_mut().find(|(known, ..)| *known == addr) {
            Some((_, last, times)) => (*last, *times) = (outcome, *times + 1),
            None => self.0.push((addr, outcome, 1)),
        }
    }

    /// Adds the records of other addresses.
    pub(crate) fn append(&mut self, mut other: Tried) {
        self.0.append(&mut other.0);
    }
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (addr, outcome, times)) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{addr} {outcome} ({times} tries)")?;
        }
        if self.0.is_empty() { f.write_str("not tried, the deadline had passed") } else { Ok(()) }
    }
}
