//! Which jobs of this user run on this machine, and in which folders: a small file for each job.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/drumline/runs/4711.json    {"pid":4711,"start":88123,"dir":"/data/exp/a","name":"a"}
//!   else /tmp/drumline-1000/runs/4711.json
//! ```
//! Rank 0 creates the file and removes it. A file that a killed job has left behind is recognised by its process, which has
//! ended, or started at another time than the file says; the next job removes it. The folder must belong to its owner only,
//! since the paths in it are opened; otherwise it is an error. Reading changes nothing. Runs that have ended are found by their
//! folders (`found`); `summary` describes a run for a list.

mod found;
mod summary;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use drumline_files::{Durability, replace};
use serde::{Deserialize, Serialize};

pub use found::{below, is_run, within};
pub use summary::{Best, RunState, Summary};

/// A job that is running.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The process of its rank 0.
    pub pid: u32,
    /// When that process started, in the kernel's ticks since boot.
    pub start: u64,
    /// Its `OUT_DIR`, an absolute path.
    pub dir: PathBuf,
    /// Its name.
    pub name: String,
}

/// The list of jobs cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunsError {
    /// Another user could write there.
    #[error("{} is not this user's alone: {why}; try removing it, or set XDG_RUNTIME_DIR", path.display())]
    NotOurs {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The system returned an error.
    #[error("cannot use {}: {source}", path.display())]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

/// The entry of a job; dropping it removes the entry.
#[derive(Debug)]
pub struct Registration {
    path: PathBuf,
}

impl Registration {
    /// Registers that this process runs a job with `out_dir`, called `name`.
    pub fn new(out_dir: &Path, name: &str) -> Result<Self, RunsError> {
        List::within(&folder_of_this_user())?.add(out_dir, name)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // If it cannot be removed, it is recognised as stale when this process has ended.
        let _ = fs::remove_file(&self.path);
    }
}

/// The jobs that are running, the oldest first.
pub fn running() -> Result<Vec<Run>, RunsError> {
    running_in(&folder_of_this_user())
}

/// As [`running`], for the list within `own`; empty if there is no list.
pub(crate) fn running_in(own: &Path) -> Result<Vec<Run>, RunsError> {
    let list = List { folder: own.join("runs") };
    if !list.folder.try_exists().map_err(cannot(&list.folder))? {
        return Ok(Vec::new());
    }
    check_owner(own)?;
    check_owner(&list.folder)?;
    let mut runs: Vec<Run> = list.entries()?.filter_map(|path| still_running(&path)).collect();
    runs.sort_by_key(|run| (run.start, run.pid));
    Ok(runs)
}

/// The folder of this user's list.
pub(crate) fn folder_of_this_user() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // The variable may still name the folder of another user, as after su.
    let is_ours = |path: &PathBuf| fs::metadata(path).is_ok_and(|data| data.is_dir() && data.uid() == user);
    match runtime.filter(|path| path.is_absolute()).filter(is_ours) {
        Some(runtime) => runtime.join("drumline"),
        // Not TMPDIR, which a job may have of its own.
        None => Path::new("/tmp").join(format!("drumline-{user}")),
    }
}

/// A folder of entries.
pub(crate) struct List {
    folder: PathBuf,
}

impl List {
    /// The list in a folder that is created if it does not exist, and must belong to this user only.
    pub(crate) fn within(own: &Path) -> Result<Self, RunsError> {
        let folder = own.join("runs");
        for path in [own, &folder] {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(cannot(path)(error));
                }
                _ => check_owner(path)?,
            }
        }
        Ok(Self { folder })
    }

    pub(crate) fn add(&self, out_dir: &Path, name: &str) -> Result<Registration, RunsError> {
        let pid = std::process::id();
        let dir = std::path::absolute(out_dir).map_err(cannot(out_dir))?;
        let start = start_of(pid).unwrap_or_default();
        for stale in self.entries()?.filter(|path| still_running(path).is_none()) {
            // Another process may have removed it just now.
            let _ = fs::remove_file(stale);
        }
        let path = self.folder.join(format!("{pid}.json"));
        let run = Run { pid, start, dir, name: name.to_owned() };
        let text = serde_json::to_string(&run).map_err(io::Error::from);
        let written = text.and_then(|text| replace(&path, text + "\n", Durability::Process));
        written.map_err(cannot(&path))?;
        Ok(Registration { path })
    }

    fn entries(&self) -> Result<impl Iterator<Item = PathBuf>, RunsError> {
        let files = fs::read_dir(&self.folder).map_err(cannot(&self.folder))?;
        let paths = files.filter_map(|entry| Some(entry.ok()?.path()));
        Ok(paths.filter(|path| path.extension().is_some_and(|end| end == "json")))
    }
}

/// The job of an entry, unless it is stale.
fn still_running(path: &Path) -> Option<Run> {
    let run = serde_json::from_slice::<Run>(&fs::read(path).ok()?).ok();
    run.filter(|run| start_of(run.pid) == Some(run.start))
}

/// When a process started, in the kernel's ticks; `None` if there is no such process.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in brackets, which may have spaces and brackets of its own.
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_whitespace().nth(19)?.parse().ok()
}

fn check_owner(path: &Path) -> Result<(), RunsError> {
    let data = fs::symlink_metadata(path).map_err(cannot(path))?;
    let user = rustix::process::geteuid().as_raw();
    let why = match data.mode() & 0o777 {
        _ if !data.is_dir() => "it is no folder".to_owned(),
        _ if data.uid() != user => format!("it is owned by user {}, expected {user}", data.uid()),
        mode if mode & 0o077 != 0 => format!("others may use it (mode {mode:o}, expected 700)"),
        _ => return Ok(()),
    };
    Err(RunsError::NotOurs { path: path.to_owned(), why })
}

fn cannot(path: &Path) -> impl FnOnce(io::Error) -> RunsError + '_ {
    |source| RunsError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    fn list(folder: &tempfile::TempDir) -> List {
        List::within(&folder.path().join("own")).unwrap()
    }

    fn running(folder: &tempfile::TempDir) -> Vec<Run> {
        running_in(&folder.path().join("own")).unwrap()
    }

    #[test]
    fn an_entry_lives_as_long_as_its_registration() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            running(&folder).is_empty() && !folder.path().join("own").exists(),
            "reading creates no list"
        );
        let list = list(&folder);
        let entry = list.add(Path::new("exp/a"), "a \"run\"").unwrap();
        let runs = running(&folder);
        assert_eq!((runs[0].pid, runs[0].name.as_str()), (std::process::id(), "a \"run\""));
        assert!(runs[0].dir.is_absolute() && runs[0].dir.ends_with("exp/a"));
        assert_eq!(fs::metadata(&list.folder).unwrap().mode() & 0o777, 0o700);
        drop(entry);
        assert!(running(&folder).is_empty());
        assert_eq!(fs::read_dir(&list.folder).unwrap().count(), 0);
    }

    #[test]
    fn entries_of_dead_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let list = list(&folder);
        let mut gone = Command::new("true").spawn().unwrap();
        let dead = gone.id();
        gone.wait().unwrap();
        let me = std::process::id();
        // The number of a process that is alive, but started at another time.
        for (file, pid, start) in [("1.json", dead, 1), ("2.json", me, start_of(me).unwrap() + 1)] {
            let run = Run { pid, start, dir: "/exp".into(), name: "x".into() };
            fs::write(list.folder.join(file), serde_json::to_string(&run).unwrap()).unwrap();
        }
        fs::write(list.folder.join("3.json"), "{").unwrap();
        let num_files = || fs::read_dir(&list.folder).unwrap().count();
        assert_eq!((running(&folder).len(), num_files()), (0, 3), "reading changes nothing");
        let kept = list.add(Path::new("/exp"), "control").unwrap();
        assert_eq!((running(&folder).len(), num_files()), (1, 1));
        drop(kept);
    }

    #[test]
    fn a_folder_that_is_not_ours_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        let error = List::within(&link).err().unwrap().to_string();
        assert!(error.contains("is no folder") && error.contains("try"), "{error}");
        fs::set_permissions(&real, Permissions::from_mode(0o770)).unwrap();
        fs::create_dir(real.join("runs")).unwrap();
        for outcome in [List::within(&real).map(drop), running_in(&real).map(drop)] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("mode 770, expected 700"), "{error}");
        }
        fs::set_permissions(&real, Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(real.join("runs"), Permissions::from_mode(0o700)).unwrap();
        assert!(List::within(&real).is_ok() && running_in(&real).is_ok(), "control");
        if rustix::process::geteuid().is_root() {
            let theirs = folder.path().join("theirs");
            fs::create_dir(&theirs).unwrap();
            std::os::unix::fs::chown(&theirs, Some(12345), None).unwrap();
            assert!(List::within(&theirs).err().unwrap().to_string().contains("owned by user 12345"));
        }
    }
}
