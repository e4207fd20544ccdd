//! A store in a file, for processes that share only a disk.
//!
//! ```text
//!  ┌────────────────────────────┬──────────┬──────────┬──
//!  │ header: magic, version,    │ request 1│ request 2│ ..     only requests that change the store, as records
//!  │ run, host and pid of maker │          │          │
//!  └────────────────────────────┴──────────┴──────────┴──
//! ```
//! The file only grows. Each process replays it into its own core, so that all have the same state. A request is
//! appended under an exclusive lock, which gives it its place in the order (`flock`, which on NFS needs Linux 2.6.12 or
//! later). A process that dies while writing leaves an incomplete record, which the next writer removes.
//!
//! Waiting calls are woken by inotify. On a shared disk, inotify does not see what other machines write. There, they
//! check again every [`RECHECK`], which is then how long a change may take to arrive.
//!
//! A file of an earlier run is recognised by the name of the run in its header.

mod header;
mod record;
mod watch;

use super::Store;
use super::error::{BadFileError, StoreError};
use super::request::{Reply, Request};
use super::timed_out::timed_out;
use crate::core::Core;
use crate::frame::Call;
use crate::reminder::Reminder;
use header::Header;
use std::collections::HashMap;
use std::fmt;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use watch::Watch;

/// How often a waiting call checks the file without an event.
const RECHECK: Duration = Duration::from_millis(200);
/// How long to wait for the lock.
const LOCK: Duration = Duration::from_secs(30);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// A store in a file that several processes share.
pub struct FileStore {
    path: PathBuf,
    header: Header,
    replica: Mutex<Replica>,
}

/// The file, and the state that was read from it.
struct Replica {
    file: File,
    /// The end of the last complete record that was read.
    end: u64,
    num_records: u64,
    core: Core<u64>,
    last_ticket: u64,
    replies: HashMap<u64, Reply>,
}

impl FileStore {
    /// Creates the file for run `run`; it must not exist.
    pub fn create(path: impl AsRef<Path>, run: &str) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        match Header::new(run).write(path) {
            Ok(()) => Self::attach(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Self::attach(path)?.stale()),
            Err(error) => Err(StoreError::io(format!("cannot create {}", path.display()))(error)),
        }
    }

    /// Joins run `run` in the file, or creates the file. A file of another run is not changed.
    pub fn open(path: impl AsRef<Path>, run: &str) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        match Header::new(run).write(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(StoreError::io(format!("cannot create {}", path.display()))(error));
            }
            _ => {}
        }
        let store = Self::attach(path)?;
        if store.header.run == run { Ok(store) } else { Err(store.stale()) }
    }

    /// Waits for the file, and joins the run in it, whatever its name.
    pub fn join(path: impl AsRef<Path>, deadline: Instant) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        let began = Instant::now();
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let watch = Watch::folder(folder.unwrap_or(Path::new(".")));
        let mut reminder = Reminder::new(began);
        loop {
            match Self::attach(path) {
                Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                result => return result,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("waiting for rank 0 to create {}", path.display());
                return Err(StoreError::Timeout { what, after: began.elapsed() });
            }
            if reminder.is_due(Instant::now()) {
                let path = path.display();
                let waited = began.elapsed();
                tracing::warn!(%path, "still waiting for rank 0 to create {path}, {waited:.0?} so far and {left:.0?} more");
            }
            watch.wait(left.min(RECHECK));
        }
    }

    fn attach(path: &Path) -> Result<FileStore, StoreError> {
        let (file, header, end) = Header::read(path)?;
        let replica = Mutex::new(Replica {
            file,
            end,
            num_records: 0,
            core: Core::new(),
            last_ticket: 0,
            replies: HashMap::new(),
        });
        Ok(FileStore { path: path.into(), header, replica })
    }

    /// The run that the file belongs to.
    pub fn run(&self) -> &str {
        &self.header.run
    }

    /// The error that says which run the file belongs to.
    pub(crate) fn stale(&self) -> StoreError {
        let Header { run, host, pid } = self.header.clone();
        StoreError::StaleFile { path: self.path.clone(), run, host, pid }
    }

    fn replica(&self) -> MutexGuard<'_, Replica> {
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, error: ReplicaError) -> StoreError {
        match error {
            ReplicaError::Bad(source) => StoreError::BadFile { path: self.path.clone(), source },
            ReplicaError::Io(source) => {
                StoreError::Io { what: format!("store file {}", self.path.display()), source }
            }
        }
    }
}

impl Store for FileStore {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        request.check_limits()?;
        if request.changes() {
            return self.replica().change(request).map_err(|error| self.failed(error));
        }
        // Watch before the first check, so that no change is missed between the two.
        let watch = request.waits().then(|| Watch::file(&self.path));
        let began = Instant::now();
        let wait = request.clone();
        let ticket = self.replica().ask(request).map_err(|error| self.failed(error))?;
        loop {
            let mut replica = self.replica();
            replica.catch_up().map_err(|error| self.failed(error))?;
            if let Some(reply) = replica.replies.remove(&ticket) {
                return Ok(reply);
            }
            let left = deadline.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                replica.core.cancel(ticket);
                drop(replica);
                return Err(timed_out(self, &wait, began));
            }
            drop(replica);
            if let Some(watch) = &watch {
                watch.wait(left.min(RECHECK));
            }
        }
    }
}

impl Replica {
    /// Appends the request and carries it out.
    fn change(&mut self, request: Request) -> Result<Reply, ReplicaError> {
        lock(&self.file, File::try_lock)?;
        let result = self.read_new().and_then(|()| self.write(&request));
        self.file.unlock()?;
        result?;
        let ticket = self.ask(request)?;
        let reply = self.replies.remove(&ticket);
        Ok(reply.ok_or_else(|| io::Error::other("a change does not wait"))?)
    }

    /// Passes the request to the core; its reply is in `replies`, now or after catching up.
    fn ask(&mut self, request: Request) -> Result<u64, ReplicaError> {
        if !request.changes() {
            self.catch_up()?;
        }
        self.last_ticket += 1;
        self.apply(self.last_ticket, request);
        Ok(self.last_ticket)
    }

    fn apply(&mut self, ticket: u64, request: Request) {
        let mut replies = Vec::new();
        self.core.apply(ticket, request, &mut replies);
        // Ticket 0 is another process's request, whose reply is not needed here.
        self.replies.extend(replies.into_iter().filter(|(ticket, _)| *ticket != 0));
    }

    fn catch_up(&mut self) -> Result<(), ReplicaError> {
        if self.file.metadata()?.len() == self.end {
            return Ok(());
        }
        lock(&self.file, File::try_lock_shared)?;
        let result = self.read_new();
        self.file.unlock()?;
        result
    }

    /// Reads the records that others have added. The caller holds the lock, so an incomplete record stays incomplete.
    fn read_new(&mut self) -> Result<(), ReplicaError> {
        let len = self.file.metadata()?.len().saturating_sub(self.end);
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, self.end)?;
        let start = self.end;
        let mut rest = bytes.as_slice();
        while let Some(record) = record::split(&mut rest).map_err(BadFileError::Frame)? {
            let expected = self.num_records + 1;
            if record.id != expected {
                return Err(BadFileError::Order { expected, got: record.id }.into());
            }
            let (_, Call::Request(request)) = record.call().map_err(BadFileError::Frame)? else {
                return Err(BadFileError::NotARequest(record.id).into());
            };
            self.num_records += 1;
            self.end = start + (bytes.len() - rest.len()) as u64;
            self.apply(0, request);
        }
        Ok(())
    }

    fn write(&mut self, request: &Request) -> Result<(), ReplicaError> {
        let bytes = record::encode(self.num_records + 1, request);
        if self.file.metadata()?.len() > self.end {
            self.file.set_len(self.end)?;
        }
        self.file.write_all_at(&bytes, self.end)?;
        self.end += bytes.len() as u64;
        self.num_records += 1;
        Ok(())
    }
}

/// Why a replica could not be read or written.
#[derive(Debug, thiserror::Error)]
enum ReplicaError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Bad(#[from] BadFileError),
}

/// Takes the lock once it is free. The wait is bounded, as the holder may be suspended.
fn lock(file: &File, attempt: impl Fn(&File) -> Result<(), TryLockError>) -> io::Result<()> {
    let until = Instant::now() + LOCK;
    loop {
        match attempt(file) {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "another process has kept it locked for 30 s",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileStore({}, run {})", self.path.display(), self.header.run)
    }
}
