//! The folders of a run's logs, in torchrun's layout.
//!
//! ```text
//!   <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}
//!   <log_dir>/<run_id>_<random>/attempt_<n>/{filtered_stdout.log,filtered_stderr.log}
//! ```
//!
//! The run's folder is readable by its owner only. Without a `log_dir` it is created among the temporary files, and it
//! is kept if it holds log files. Otherwise it only holds the workers' error files. Then it is *temporary*: the process
//! that starts the workers creates it, and the process that outlives them removes it.

use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Channel, LogPlan};
use crate::random::random_number;

/// How many characters of a run's id go into its folder's name.
const LONGEST_ID: usize = 100;

/// A folder or file of the logs could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {path}: {source}; try another --log-dir")]
pub struct LogError {
    what: &'static str,
    path: String,
    #[source]
    source: io::Error,
}

impl LogError {
    fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { what, path: path.display().to_string(), source }
    }
}

/// The folder of one run on this node.
#[derive(Debug)]
pub struct LogFolder {
    plan: Arc<LogPlan>,
    role: Arc<str>,
    run: Option<PathBuf>,
    is_temporary: bool,
}

impl LogFolder {
    /// The folder of the run `run_id`, whose workers have the given role. It is created now unless it is temporary.
    pub fn create(plan: LogPlan, run_id: &str, role: &str) -> Result<Self, LogError> {
        let is_temporary = plan.dir.is_none() && !plan.writes_files();
        let run = plan.wants_folder().then(|| name(plan.dir.as_deref(), run_id));
        if let Some(run) = run.as_deref().filter(|_| !is_temporary) {
            make(run)?;
        }
        Ok(Self { plan: Arc::new(plan), role: Arc::from(role), run, is_temporary })
    }

    /// `<log_dir>/<run_id>_<random>`; `None` when the plan has no folder.
    pub fn path(&self) -> Option<&Path> {
        self.run.as_deref()
    }

    /// The folders of the `attempt`-th start of `nproc` workers, created now unless temporary. A second start with the
    /// same number appends to the files of the first.
    pub fn attempt(&self, attempt: usize, nproc: usize) -> Result<AttemptLogs, LogError> {
        let dir = self.run.as_ref().map(|run| run.join(format!("attempt_{attempt}")));
        let temporary = self.run.clone().filter(|_| self.is_temporary);
        let logs = AttemptLogs { plan: Arc::clone(&self.plan), role: Arc::clone(&self.role), dir, temporary };
        if !self.is_temporary {
            logs.make(nproc)?;
        }
        Ok(logs)
    }
}

impl Drop for LogFolder {
    fn drop(&mut self) {
        if let Some(run) = self.run.as_deref().filter(|_| self.is_temporary) {
            remove(run);
        }
    }
}

/// The path of a run's folder, with an unpredictable name.
fn name(log_dir: Option<&Path>, run_id: &str) -> PathBuf {
    let base = log_dir.map_or_else(std::env::temp_dir, Path::to_path_buf);
    // Among other programs' temporary files, the name says which program it belongs to.
    let program = if log_dir.is_none() { "drumline_" } else { "" };
    base.join(format!("{program}{}_{:016x}", safe_name(run_id), random_number() as u64))
}

/// Creates a folder and its parents, for its owner only.
fn make(folder: &Path) -> Result<(), LogError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(LogError::at("create the folder", folder))
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, folder = %folder.display(), "cannot remove a temporary folder");
        }
        _ => {}
    }
}

/// `run_id` without characters that have a meaning in a path.
fn safe_name(run_id: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = run_id.chars().map(safe).take(LONGEST_ID).collect();
    match name.strip_prefix('.') {
        Some(rest) => format!("_{rest}"),
        None if name.is_empty() => "none".to_string(),
        None => name,
    }
}

/// The logs of one start of the workers; by default no files, and everything on the console.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptLogs {
    pub(super) plan: Arc<LogPlan>,
    pub(super) role: Arc<str>,
    dir: Option<PathBuf>,
    /// The run's folder, if it is temporary.
    temporary: Option<PathBuf>,
}

impl AttemptLogs {
    /// Creates the folders of `nproc` workers.
    pub(crate) fn make(&self, nproc: usize) -> Result<(), LogError> {
        for folder in (0..nproc).filter_map(|local_rank| self.folder(local_rank)) {
            make(&folder)?;
            // An error of an earlier start must not be mistaken for one of this start.
            match fs::remove_file(folder.join("error.json")) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(LogError::at("clear the folder", &folder)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes a temporary folder, in place of the owner of the [`LogFolder`].
    pub(crate) fn remove_temporary(&self) {
        self.temporary.as_deref().into_iter().for_each(remove);
    }

    /// The file into which a worker writes its own error (`TORCHELASTIC_ERROR_FILE`).
    pub fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        Some(self.folder(local_rank)?.join("error.json"))
    }

    fn folder(&self, local_rank: usize) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(local_rank.to_string()))
    }

    /// Opens the file of a stream; `None` without a folder.
    pub(super) fn open(&self, local_rank: usize, channel: Channel) -> Result<Option<File>, LogError> {
        let name = match channel {
            Channel::Out => "stdout.log",
            Channel::Err => "stderr.log",
        };
        self.folder(local_rank).map(|folder| append_to(&folder.join(name))).transpose()
    }

    /// Opens the file of filtered lines of all workers; `None` without a folder or without filters.
    pub(super) fn open_filtered(&self, channel: Channel) -> Result<Option<File>, LogError> {
        let name = match channel {
            Channel::Out => "filtered_stdout.log",
            Channel::Err => "filtered_stderr.log",
        };
        let dir = self.dir.as_ref().filter(|_| !self.plan.duplicates.of(channel).is_empty());
        dir.map(|dir| append_to(&dir.join(name))).transpose()
    }
}

fn append_to(path: &Path) -> Result<File, LogError> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    file.map_err(LogError::at("write", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn plan(dir: Option<&Path>, redirects: &str) -> LogPlan {
        let redirects = redirects.parse().unwrap();
        LogPlan { dir: dir.map(Path::to_path_buf), redirects, ..LogPlan::default() }
    }

    #[test]
    fn the_layout_is_that_of_torchrun_and_is_kept() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/b");
        let folder = LogFolder::create(plan(Some(&dir), "0"), "job7", "default").unwrap();
        let run = folder.path().unwrap().to_path_buf();
        assert_eq!(run.parent(), Some(&*dir));
        assert!(run.file_name().unwrap().to_str().unwrap().starts_with("job7_"));
        assert_eq!(fs::metadata(&run).unwrap().permissions().mode() & 0o777, 0o700);
        let logs = folder.attempt(2, 2).unwrap();
        assert_eq!(logs.error_file(1), Some(run.join("attempt_2/1/error.json")));
        assert!(run.join("attempt_2/0").is_dir() && run.join("attempt_2/1").is_dir());
        drop(folder);
        assert!(run.is_dir(), "a requested folder is kept");
    }

    #[test]
    fn a_second_start_keeps_the_output_and_removes_the_error() {
        let base = tempfile::tempdir().unwrap();
        let folder = LogFolder::create(plan(Some(base.path()), "3"), "x", "default").unwrap();
        for text in ["one", "two"] {
            let logs = folder.attempt(0, 1).unwrap();
            assert!(!logs.error_file(0).unwrap().exists());
            io::Write::write_all(&mut logs.open(0, Channel::Err).unwrap().unwrap(), text.as_bytes()).unwrap();
            fs::write(logs.error_file(0).unwrap(), "{}").unwrap();
        }
        let log = folder.path().unwrap().join("attempt_0/0/stderr.log");
        assert_eq!(fs::read_to_string(log).unwrap(), "onetwo");
    }

    #[test]
    fn a_temporary_folder_is_created_late_and_removed_with_its_owner_or_before() {
        for (redirects, is_kept) in [("0", false), ("0:2", true)] {
            let folder = LogFolder::create(plan(None, redirects), "x", "default").unwrap();
            let run = folder.path().unwrap().to_path_buf();
            let logs = folder.attempt(0, 1).unwrap();
            assert_eq!(run.exists(), is_kept, "{redirects}");
            logs.make(1).unwrap();
            assert_eq!(fs::metadata(&run).unwrap().permissions().mode() & 0o777, 0o700);
            drop(folder);
            assert_eq!(run.exists(), is_kept, "{redirects}");
            logs.make(1).unwrap();
            logs.remove_temporary();
            assert_eq!(run.exists(), is_kept, "{redirects}");
            let _ = fs::remove_dir_all(run);
        }
        let none = LogFolder::create(plan(Some(Path::new("/dev/null")), "3"), "x", "default").unwrap();
        assert_eq!((none.path(), none.attempt(0, 1).unwrap().error_file(0)), (None, None));
    }

    #[test]
    fn unusual_run_ids_stay_inside_the_folder() {
        let long = "é".repeat(300);
        for id in ["../../etc", "/abs", "..", "", "a b\nc", "\0", ".hidden", "-rf", &long] {
            let base = tempfile::tempdir().unwrap();
            let folder = LogFolder::create(plan(Some(base.path()), "0"), id, "default").unwrap();
            let run = folder.path().unwrap();
            assert_eq!(run.parent(), Some(base.path()), "{id:?}");
            assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1, "{id:?}");
            assert!(!run.file_name().unwrap().to_str().unwrap().starts_with('.'), "{id:?}");
        }
        assert_eq!(safe_name("exp-1_b.2"), "exp-1_b.2");
    }

    #[test]
    fn a_log_dir_that_is_a_file_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = LogFolder::create(plan(Some(file.path()), "0"), "x", "default").unwrap_err().to_string();
        assert!(error.contains(file.path().to_str().unwrap()) && error.contains("--log-dir"), "{error}");
    }
}
