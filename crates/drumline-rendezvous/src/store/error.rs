//! What can go wrong with a store.

use crate::frame::FrameError;
use crate::handshake::HandshakeError;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Why a store could not be reached or did not do what was asked.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed first.
    #[error(
        "{what} timed out after {after:.1?}: nobody made it come true; try looking at the ranks that should have"
    )]
    Timeout {
        /// The request, with those of its keys that are missing.
        what: String,
        /// How long was waited.
        after: Duration,
    },
    /// The request cannot be carried out as things stand.
    #[error("the store did not do it: {reason}")]
    Rejected {
        /// Why.
        reason: String,
    },
    /// Beyond a limit.
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
        /// Where it was.
        addr: String,
        /// The request.
        what: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The server was there and does not answer any more.
    #[error(
        "the store at {addr} did not answer for {after:.1?} during {what}: its host (rank 0 or the launcher) stands still or cannot be reached; try looking at that host, or a longer DRUMLINE_HOST_TIMEOUT if the network may be out for so long"
    )]
    Silent {
        /// Where it was.
        addr: String,
        /// The request.
        what: String,
        /// For how long nothing came.
        after: Duration,
    },
    /// Nobody answered as the store before the deadline.
    #[error(
        "no store at {addr} after {after:.1?}: {tried}; try checking that rank 0 (or the launcher) runs and that MASTER_ADDR and MASTER_PORT are the same on all ranks"
    )]
    Unreachable {
        /// Where it should have been.
        addr: String,
        /// How long it was tried.
        after: Duration,
        /// Each address and what happened there.
        tried: Tried,
    },
    /// Nobody proved the job key on any of the ports that follow from the job's number.
    #[error(
        "no store of this job on {host} after {after:.1?}: {tried}; try checking that rank 0 (or the launcher) runs and has the same job key, or a free port of that host on all ranks (MASTER_PORT, or --master-port of `drumline run`)"
    )]
    NotOnAnyPort {
        /// Where it should have been.
        host: String,
        /// How long it was tried.
        after: Duration,
        /// Each address and what happened there.
        tried: Tried,
    },
    /// Nobody knows the name.
    #[error(
        "the name `{host}` cannot be resolved, tried for {after:.1?}: {source}; try an address, or a name that this machine knows (`getent hosts {host}`)"
    )]
    Unresolved {
        /// The name.
        host: String,
        /// How long it was tried.
        after: Duration,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Somebody answered, and the meeting failed.
    #[error("cannot join the store at {addr}: {source}")]
    Handshake {
        /// Where.
        addr: String,
        /// What happened.
        #[source]
        source: HandshakeError,
    },
    /// The other side does not keep to the protocol.
    #[error("the store at {addr} sent something that is no reply: {source}")]
    Protocol {
        /// Where.
        addr: String,
        /// What was wrong with it.
        #[source]
        source: FrameError,
    },
    /// The open key is for loopback.
    #[error(
        "no job key was given, so only loopback may be used and {addr} is not; try `drumline key new job.key` once, copy it to every machine, and DRUMLINE_JOB_KEY_FILE=job.key on all ranks"
    )]
    NeedsSecret {
        /// The address asked for.
        addr: String,
    },
    /// The server's address cannot be listened on.
    #[error("cannot listen on {addr}: {source}; {advice}")]
    Bind {
        /// The address asked for.
        addr: String,
        /// What to do about it.
        advice: String,
        /// What the system said.
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
    /// The file is no store, or damaged.
    #[error("{} is no store file: {reason}; try another path, or removing the file", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    /// Whether the deadline passed and nothing else is wrong.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// Whether a new round of the job may do better; the others are mistakes in the program or its set-up.
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

    /// Whether somebody else listens at the address that a server was to have.
    pub fn is_port_taken(&self) -> bool {
        matches!(self, Self::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }

    /// A timeout as seen by one who has waited in several calls since `began`; other errors are as they were.
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

/// What happened last at each address that was tried.
#[derive(Debug, Default, Clone)]
pub struct Tried(Vec<(String, String, u32)>);

impl Tried {
    /// Notes one more try at `addr`.
    pub(crate) fn note(&mut self, addr: String, outcome: String) {
        match self.0.iter_mut().find(|(known, ..)| *known == addr) {
            Some((_, last, times)) => (*last, *times) = (outcome, *times + 1),
            None => self.0.push((addr, outcome, 1)),
        }
    }

    /// Takes over what was noted elsewhere, of other addresses.
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
