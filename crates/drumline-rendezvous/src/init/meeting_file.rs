//! The file by which ranks meet that share a disk: rank 0 writes there where its store is, and the key to it.

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

/// Rank 0's file; removed at the end, so that the next run finds none.
#[derive(Debug)]
pub(super) struct MeetingFile(PathBuf);

impl MeetingFile {
    /// Makes the file; one that is there already is of another run.
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

/// What a rank other than 0 has read.
pub(super) struct Found {
    pub(super) addr: SocketAddr,
    pub(super) key: JobKey,
    file: FileStore,
}

/// Waits for rank 0's note. Rank 0 listens before it writes; so if nobody listens there, the file is an old one.
pub(super) fn find(path: &Path, deadline: Instant) -> Result<Found, InitError> {
    let file = FileStore::join(path, deadline)?;
    let note = file.get(KEY, deadline)?;
    let faulty = |reason: String| InitError::MeetingFile { path: path.display().to_string(), reason };
    let note: Note =
        serde_json::from_slice(&note).map_err(|error| faulty(format!("{error}; try removing it")))?;
    if note.addr.ip().is_loopback() && note.host != this_host() {
        let (host, addr) = (note.host, note.addr);
        return Err(faulty(format!(
            "rank 0 on {host} listens on {addr}, which other machines cannot reach; try {MASTER_ADDR}=(its address) for rank 0"
        )));
    }
    let patience = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    match TcpStream::connect_timeout(&note.addr, patience.min(Duration::from_secs(5))) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(file.stale().into()),
        _ => Ok(Found { addr: note.addr, key: JobKey::from_hex(&note.key)?, file }),
    }
}

impl Found {
    /// Somebody else has the port by now: the file is an old one.
    pub(super) fn judge(&self, error: InitError) -> InitError {
        match error {
            InitError::Store(StoreError::Handshake {
                source: HandshakeError::Closed | HandshakeError::NotProved,
                ..
            }) => self.file.stale().into(),
            other => other,
        }
    }
}

/// Addresses under which other machines may reach this one: what it is told, or else what its own name stands for.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    let name = std::env::var(MASTER_ADDR).unwrap_or_else(|_| this_host());
    let addrs = (name.as_str(), 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    addrs.into_iter().map(|addr| addr.ip()).filter(|ip| !ip.is_loopback()).collect()
}
