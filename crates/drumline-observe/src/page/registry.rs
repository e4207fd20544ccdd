//! The running jobs of this user: `runs/PID.json` in a folder that nobody else may write.
//!
//! In: the folder. Out: those whose process still runs. Not here: adding and removing entries, which is the jobs' part.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A job that runs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Job {
    pid: u32,
    /// When the process began, as `/proc` has it: a number may be given to another process later.
    start: u64,
    pub(super) dir: PathBuf,
    pub(super) name: String,
}

/// Where jobs of this user say that they run.
pub(super) fn folder() -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let base = runtime.map(|folder| PathBuf::from(folder).join("drumline"));
    base.unwrap_or_else(|| PathBuf::from(format!("/tmp/drumline-{uid}"))).join("runs")
}

/// The jobs of a registry that run now; none if it is not there.
pub(super) fn running(folder: &Path) -> io::Result<Vec<Job>> {
    let metadata = match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        metadata => metadata?,
    };
    if metadata.uid() != rustix::process::getuid().as_raw()
        || !metadata.is_dir()
        || metadata.mode() & 0o022 != 0
    {
        let why = "it is not ours alone; try removing it, or another XDG_RUNTIME_DIR";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let files = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let jobs = files.filter_map(|path| serde_json::from_slice::<Job>(&fs::read(path).ok()?).ok());
    let mut jobs: Vec<_> = jobs.filter(|job| start_of(job.pid) == Some(job.start)).collect();
    jobs.sort_by_key(|job| (job.start, job.pid));
    Ok(jobs)
}

/// The 22nd field of `/proc/PID/stat`; the second, a name in brackets, may hold anything.
pub(super) fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn register(folder: &Path, pid: u32, start: u64) {
        let entry = serde_json::json!({"pid": pid, "start": start, "dir": "/a", "name": "n"});
        fs::write(folder.join(format!("{pid}-{start}.json")), entry.to_string()).unwrap();
    }

    #[test]
    fn only_living_processes_count() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(running(&folder.path().join("none")).unwrap(), []);
        let pid = std::process::id();
        let start = start_of(pid).unwrap();
        register(folder.path(), pid, start);
        register(folder.path(), pid, start + 1);
        register(folder.path(), u32::MAX, start);
        fs::write(folder.path().join("broken.json"), "{").unwrap();
        let jobs = running(folder.path()).unwrap();
        assert_eq!(jobs, [Job { pid, start, dir: "/a".into(), name: "n".into() }]);
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(running(folder.path()).unwrap_err().to_string().contains("not ours alone"));
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(running(folder.path()).is_ok());
    }
}
