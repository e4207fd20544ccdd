//! The meeting file of ranks that share a disk: rank 0 writes the address of its store and the key into it.

use super::InitError;
use crate::JobKey;
use crate::handshake::{HandshakeError, this_host};
use crate::job_key::random_bytes;
use crate::store::Store;
use crate::store::error::StoreError;
use crate::store::file::FileStore;
use crate::worker_env::MASTER_ADDR;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const KEY: &str = "meeting";

#[derive(Serialize, Deserialize)]
struct Note {
    addr: SocketAddr,
    key: String,
    host: String,
}

/// Why a meeting file is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeetingFileError {
    /// It is not valid JSON.
    #[error("{0}; try removing it")]
    Json(serde_json::Error),
    /// Rank 0 listens on an address that this machine cannot reach.
    #[error(
        "rank 0 on {host} listens on {addr}, which other machines cannot reach; try {MASTER_ADDR}=(its address) for rank 0"
    )]
    Loopback {
        /// The host of rank 0.
        host: String,
        /// The address of its store.
        addr: SocketAddr,
    },
}

/// Rank 0's file. It is removed at the end, so that the next run finds none.
#[derive(Debug)]
pub(super) struct MeetingFile(PathBuf);

impl MeetingFile {
    /// Creates the file; an existing one belongs to another run.
    pub(super) fn publish(path: &Path, addr: SocketAddr, key: &JobKey) -> Result<MeetingFile, InitError> {
        let mut run = [0; 8];
        random_bytes(&mut run);
        let store = FileStore::create(path, &format!("{:016x}", u64::from_le_bytes(run)))?;
        let file = MeetingFile(path.into());
        let note = Note { addr, key: key.to_hex().to_string(), host: this_host() };
        let note = serde_json::to_vec(&note).expect("a note has only strings");
        store.set(KEY, &note)?;
        Ok(file)
    }
}

impl Drop for MeetingFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What a rank other than 0 has read from the file.
pub(super) struct Found {
    pub(super) addr: SocketAddr,
    pub(super) key: JobKey,
    file: FileStore,
}

/// Waits for rank 0's note. Rank 0 listens before it writes, so if nothing listens there, the file is from an earlier
/// run.
pub(super) fn find(path: &Path, deadline: Instant) -> Result<Found, InitError> {
    let file = FileStore::join(path, deadline)?;
    let note = file.get(KEY, deadline)?;
    let invalid = |source| InitError::MeetingFile { path: path.display().to_string(), source };
    let note: Note = serde_json::from_slice(&note).map_err(|error| invalid(MeetingFileError::Json(error)))?;
    if note.addr.ip().is_loopback() && note.host != this_host() {
        return Err(invalid(MeetingFileError::Loopback { host: note.host, addr: note.addr }));
    }
    let timeout = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    match TcpStream::connect_timeout(&note.addr, timeout.min(Duration::from_secs(5))) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(file.stale().into()),
        _ => Ok(Found { addr: note.addr, key: JobKey::from_hex(&note.key)?, file }),
    }
}

impl Found {
    /// Explains an error: if another server has the port by now, the file is from an earlier run.
    pub(super) fn explain(&self, error: InitError) -> InitError {
        match error {
            InitError::Store(StoreError::Handshake {
                source: HandshakeError::Closed | HandshakeError::NotProved,
                ..
            }) => self.file.stale().into(),
            other => other,
        }
    }
}

/// Addresses at which other machines may reach this one: `MASTER_ADDR`, or those of its own name.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    let name = std::env::var(MASTER_ADDR).unwrap_or_else(|_| this_host());
    let addrs = (name.as_str(), 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    addrs.into_iter().map(|addr| addr.ip()).filter(|ip| !ip.is_loopback()).collect()
}
