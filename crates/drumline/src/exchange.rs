//! Objects of all ranks brought to rank 0: through the group, or through files where the user has said in which folder.
//!
//! ```text
//!   Exchange::Group            rank r ── group ──▶ rank 0                      any size
//!   Exchange::Folder(shared)   rank r ─▶ shared/NAME.r ─ all have written ─▶ rank 0 reads and removes
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drumline_comm::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::loader::Cause;
use crate::run_error::RunError;
use crate::shared_failure::agree_on;

/// How long a file that another node has written may take to be seen here, as file systems of networks have caches.
const SEEN_WITHIN: Duration = Duration::from_secs(30);

/// By which way large objects go.
///
/// ```
/// use drumline::{Exchange, LocalGroup};
///
/// let folder = tempfile::tempdir()?;
/// for way in [Exchange::Group, Exchange::Folder(folder.path().into())] {
///     let found = LocalGroup::run(3, |group| {
///         Ok(way.gather(&group, &format!("of rank {}", group.rank())).expect("nothing fails"))
///     })?;
///     assert_eq!(found[0].as_deref(), Some(&["of rank 0", "of rank 1", "of rank 2"].map(String::from)[..]));
///     assert_eq!(found[1], None);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Exchange {
    /// Through the group.
    #[default]
    Group,
    /// Through files in this folder, which all ranks see, as NJUNMT's `--shared_dir`.
    Folder(PathBuf),
}

impl Exchange {
    /// The folder's way if there is one, else the group's.
    pub fn by(folder: Option<&Path>) -> Self {
        folder.map_or(Self::Group, |folder| Self::Folder(folder.to_owned()))
    }

    /// The objects of all ranks, in their order, on rank 0. All ranks call it; an error is on all of them, and nothing is left in the folder.
    #[track_caller]
    pub fn gather<T: Serialize + DeserializeOwned>(
        &self,
        group: &ProcessGroup,
        object: &T,
    ) -> Result<Option<Vec<T>>, RunError> {
        match self {
            Self::Group => Ok(group.gather_object(object, 0)?),
            Self::Folder(folder) => through(folder, group, object),
        }
    }
}

#[track_caller]
fn through<T: Serialize + DeserializeOwned>(
    folder: &Path,
    group: &ProcessGroup,
    object: &T,
) -> Result<Option<Vec<T>>, RunError> {
    let name: String = group.broadcast_object((group.rank() == 0).then(unique_name).as_ref(), 0)?;
    let path = |rank: usize| folder.join(format!("{name}.{rank}"));
    let own = Removed(path(group.rank()));
    agree_on(group, write(&own.0, object))?;
    let read = match group.rank() {
        0 => (0..group.size()).map(|rank| read(&path(rank))).collect::<Result<Vec<_>, _>>().map(Some),
        _ => Ok(None),
    };
    // Only when rank 0 has read them may the files go.
    agree_on(group, read)
}

/// A file that goes when its writer has done with it.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn unique_name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!(".drumline-{}-{}", std::process::id(), now.as_nanos())
}

fn write<T: Serialize>(path: &Path, object: &T) -> Result<(), Cause> {
    let bytes = rmp_serde::to_vec(object)?;
    let written = File::create(path).and_then(|mut file| {
        file.write_all(&bytes)?;
        file.sync_all()
    });
    written.map_err(|error| {
        format!("cannot write {path:?} for the other ranks: {error}; try another shared folder, or none")
            .into()
    })
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Cause> {
    let begin = Instant::now();
    let bytes = loop {
        match std::fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && begin.elapsed() < SEEN_WITHIN => {
                std::thread::sleep(Duration::from_millis(50));
            }
            read => break read,
        }
    };
    let bytes = bytes.map_err(|error| {
        format!(
            "cannot read {path:?}, which another rank has written: {error}; try a shared folder that all nodes see, \
             or none"
        )
    })?;
    Ok(rmp_serde::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::LocalGroup;

    #[test]
    fn large_objects_go_both_ways_and_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for way in [Exchange::Group, Exchange::by(Some(folder.path()))] {
            let found = LocalGroup::run(4, |group| {
                let words = vec![format!("word {}", group.rank()); 100_000];
                Ok(way.gather(&group, &words).unwrap().map(|all| {
                    all.iter().enumerate().all(|(rank, words)| words[99_999] == format!("word {rank}"))
                }))
            });
            assert_eq!(found.unwrap(), [Some(true), None, None, None]);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_told_on_all_ranks() {
        let told = LocalGroup::run(3, |group| {
            let way = Exchange::Folder("/no/such/folder".into());
            Ok(way.gather(&group, &1).unwrap_err().to_string())
        });
        for text in told.unwrap() {
            assert!(text.contains("/no/such/folder") && text.contains("try another shared folder"), "{text}");
        }
    }
}
