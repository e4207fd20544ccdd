//! The store in a file, for processes that share a disk and nothing else.
//!
//! ```text
//!  ┌────────────────────────────┬──────────┬──────────┬──
//!  │ header: magic, version,    │ request 1│ request 2│ ..     only requests that change something, as records
//!  │ run, host and pid of maker │          │          │
//!  └────────────────────────────┴──────────┴──────────┴──
//! ```
//! The file only grows. Each process replays it into a core of its own, so that all hold the same state; a request
//! is appended, and thereby gets its place in the order, under an exclusive lock (`flock`, which on NFS needs
//! Linux 2.6.12 or later). A process that dies while writing leaves half a record, which the next writer cuts off.
//!
//! Those who wait are woken by inotify. On a shared disk inotify does not see what other machines write; there,
//! they look again every [`RECHECK`], which is then how long news may take.
//!
//! A file of an earlier run is recognised by the name of the run in its header.

mod header;
mod record;
mod watch;

use super::Store;
use super::error::StoreError;
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

/// How often a waiting call looks at the file by itself.
const RECHECK: Duration = Duration::from_millis(200);
/// Time for others to let go of the lock.
const LOCK: Duration = Duration::from_secs(30);
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// A store in a file that several processes share.
pub struct FileStore {
    path: PathBuf,
    header: Header,
    replica: Mutex<Replica>,
}

/// The file, and what has been read of it.
struct Replica {
    file: File,
    /// End of the last whole record that was read.
    end: u64,
    num_records: u64,
    core: Core<u64>,
    last_ticket: u64,
    replies: HashMap<u64, Reply>,
}

impl FileStore {
    /// Makes the file, for run `run`; it must not be there.
    pub fn create(path: impl AsRef<Path>, run: &str) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        match Header::new(run).write(path) {
            Ok(()) => Self::attach(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Self::attach(path)?.stale()),
            Err(error) => Err(StoreError::io(format!("cannot make {}", path.display()))(error)),
        }
    }

    /// Joins run `run` in the file, or makes the file. One of another run is not touched.
    pub fn open(path: impl AsRef<Path>, run: &str) -> Result<FileStore, StoreError> {
        let path = path.as_ref();
        match Header::new(run).write(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(StoreError::io(format!("cannot make {}", path.display()))(error));
            }
            _ => {}
        }
        let store = Self::attach(path)?;
        if store.header.run == run { Ok(store) } else { Err(store.stale()) }
    }

    /// Waits for the file and joins whatever run is in it.
    pub fn join(path: impl AsRef<Path>, deadline: Instant) -> Result<FileStore, StoreError> {
        let (path, began) = (path.as_ref(), Instant::now());
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
                let what = format!("waiting for rank 0 to make {}", path.display());
                return Err(StoreError::Timeout { what, after: began.elapsed() });
            }
            if reminder.is_due(Instant::now()) {
                let (path, waited) = (path.display(), began.elapsed());
                tracing::warn!(%path, "still waits for rank 0 to make {path}, {waited:.0?} so far and {left:.0?} more");
            }
            watch.wait(left.min(RECHECK));
        }
    }

    fn attach(path: &Path) -> Result<FileStore, StoreError> {
        let (file, header, end) = Header::read(path)?;
        let (core, replies) = (Core::new(), HashMap::new());
        let replica = Mutex::new(Replica { file, end, num_records: 0, core, last_ticket: 0, replies });
        Ok(FileStore { path: path.into(), header, replica })
    }

    /// The run that the file belongs to.
    pub fn run(&self) -> &str {
        &self.header.run
    }

    /// The error that says whose the file is.
    pub(crate) fn stale(&self) -> StoreError {
        let Header { run, host, pid } = self.header.clone();
        StoreError::StaleFile { path: self.path.clone(), run, host, pid }
    }

    fn replica(&self) -> MutexGuard<'_, Replica> {
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, error: io::Error) -> StoreError {
        match error.kind() {
            io::ErrorKind::InvalidData => {
                StoreError::BadFile { path: self.path.clone(), reason: error.to_string() }
            }
            _ => StoreError::Io { what: format!("store file {}", self.path.display()), source: error },
        }
    }
}

impl Store for FileStore {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        request.check_limits()?;
        if request.changes() {
            return self.replica().change(request).map_err(|error| self.failed(error));
        }
        // Watched before the first look, so that no change falls between the two.
        let watch = request.waits().then(|| Watch::file(&self.path));
        let (began, asked) = (Instant::now(), request.clone());
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
                return Err(timed_out(self, &asked, began));
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
    fn change(&mut self, request: Request) -> io::Result<Reply> {
        lock(&self.file, File::try_lock)?;
        let result = self.read_new().and_then(|()| self.write(&request));
        self.file.unlock()?;
        result?;
        let ticket = self.ask(request)?;
        self.replies.remove(&ticket).ok_or_else(|| io::Error::other("a change does not wait"))
    }

    /// Gives the request to the core; its reply is in `replies`, now or after catching up.
    fn ask(&mut self, request: Request) -> io::Result<u64> {
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
        // Ticket 0: somebody else's request, whose reply nobody here wants.
        self.replies.extend(replies.into_iter().filter(|(ticket, _)| *ticket != 0));
    }

    fn catch_up(&mut self) -> io::Result<()> {
        if self.file.metadata()?.len() == self.end {
            return Ok(());
        }
        lock(&self.file, File::try_lock_shared)?;
        let result = self.read_new();
        self.file.unlock()?;
        result
    }

    /// Reads the records that others have added. Under a lock, so that half a record is one that stays half.
    fn read_new(&mut self) -> io::Result<()> {
        let len = self.file.metadata()?.len().saturating_sub(self.end);
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, self.end)?;
        let (start, mut rest) = (self.end, bytes.as_slice());
        while let Some(record) = record::split(&mut rest).map_err(invalid)? {
            if record.id != self.num_records + 1 {
                return Err(invalid(format!("record {} has number {}", self.num_records + 1, record.id)));
            }
            let (_, Call::Request(request)) = record.call().map_err(invalid)? else {
                return Err(invalid(format!("record {} is no request", record.id)));
            };
            self.num_records += 1;
            self.end = start + (bytes.len() - rest.len()) as u64;
            self.apply(0, request);
        }
        Ok(())
    }

    fn write(&mut self, request: &Request) -> io::Result<()> {
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

fn invalid(reason: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.to_string())
}

/// Takes the lock when it is free; a holder that was stopped must not hold us for ever.
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
