//! The thread that writes a rank's file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use drumline_files::{Durability, replace};

use super::{Place, RANKS, State, Status};

/// Twice a second.
const EVERY: Duration = Duration::from_millis(500);

/// The rank's file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} cannot write {}: {source}; try another OUT_DIR", path.display())]
pub struct StatusError {
    rank: usize,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Writes a rank's file until it is dropped, and then a last time.
///
/// A rank that ends without [`Status::ended`] or [`Status::failed`] stays `running` in its file, so readers consider it lost. A rank
/// that panics has failed.
#[derive(Debug)]
pub struct StatusWriter {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    status: Status,
}

impl StatusWriter {
    /// Writes `out_dir/ranks/NNNNN.json` now, and from then on twice a second.
    pub fn start(out_dir: &Path, rank: usize, status: &Status) -> Result<Self, StatusError> {
        let path = out_dir.join(RANKS).join(format!("{rank:05}.json"));
        let failed = |source| StatusError { rank, path: path.clone(), source };
        fs::create_dir_all(out_dir.join(RANKS)).map_err(failed)?;
        let file = StatusFile { path: path.clone(), place: Place::new(rank), status: status.clone() };
        file.write().map_err(failed)?;
        let (stop, stopped) = channel();
        let run = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                file.write_or_warn();
            }
            file.write_or_warn();
        };
        let thread = std::thread::Builder::new().name("status".into()).spawn(run).map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), status: status.clone() })
    }
}

impl Drop for StatusWriter {
    fn drop(&mut self) {
        if std::thread::panicking() && self.status.lock().state == State::Running {
            self.status.failed("the rank panicked");
        }
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // The thread only writes a file, and a failure has been logged.
            let _ = thread.join();
        }
    }
}

struct StatusFile {
    path: PathBuf,
    place: Place,
    status: Status,
}

impl StatusFile {
    fn write(&self) -> io::Result<()> {
        let text = serde_json::to_string(&self.status.now(&self.place))?;
        replace(&self.path, text + "\n", Durability::Process)
    }

    /// Writes the file. A full disk is no reason to end a training.
    fn write_or_warn(&self) {
        if let Err(error) = self.write() {
            let (rank, path) = (self.place.rank, self.path.display());
            tracing::debug!(rank, %path, %error, "cannot write the rank's status");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_file_is_updated_in_the_background() {
        let folder = tempfile::tempdir().unwrap();
        let status = Status::default();
        let writer = StatusWriter::start(folder.path(), 1, &status).unwrap();
        assert_eq!(read(folder.path())[0].step, 0, "it is there at once");
        status.step(7, 2);
        let end = Instant::now() + Duration::from_secs(20);
        while read(folder.path())[0].step != 7 {
            assert!(Instant::now() < end, "it was never written again");
            std::thread::sleep(Duration::from_millis(20));
        }
        status.failed("no memory");
        drop(writer);
        let last = &read(folder.path())[0];
        assert_eq!((last.state, last.error.as_deref(), last.epoch), (State::Failed, Some("no memory"), 2));
        assert_eq!(fs::read_dir(folder.path().join(RANKS)).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_panic_is_reported_and_a_silent_end_is_not_an_end() {
        for (panics, expected) in [(true, State::Failed), (false, State::Running)] {
            let folder = tempfile::tempdir().unwrap();
            let out_dir = folder.path().to_owned();
            let rank = std::thread::spawn(move || {
                let _writer = StatusWriter::start(&out_dir, 0, &Status::default()).unwrap();
                assert!(!panics, "on purpose");
            });
            assert_eq!(rank.join().is_err(), panics);
            assert_eq!(read(folder.path())[0].state, expected);
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = StatusWriter::start(file.path(), 4, &Status::default()).unwrap_err().to_string();
        assert!(error.contains("rank 4 cannot write") && error.contains("ranks/00004.json"), "{error}");
    }
}
