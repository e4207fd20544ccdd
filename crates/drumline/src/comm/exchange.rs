//! Gathers objects of all ranks on rank 0: through the group, or through files in a folder that the user names.
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

use crate::comm::shared_failure::agree_on;
use crate::data::loader::Cause;
use crate::run_error::RunError;

/// How long a file of another node may take to appear here, because network file systems have caches.
const SEEN_WITHIN: Duration = Duration::from_secs(30);

/// How large objects are gathered.
///
/// ```
/// use drumline::comm::{Exchange, LocalGroup};
///
/// let folder = tempfile::tempdir()?;
/// for exchange in [Exchange::Group, Exchange::Folder(folder.path().into())] {
///     let found = LocalGroup::run(3, |group| {
///         Ok(exchange.gather(&group, &format!("of rank {}", group.rank())).expect("nothing fails"))
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
    /// Through files in this folder, which all ranks see, like NJUNMT's `--shared_dir`.
    Folder(PathBuf),
}

impl Exchange {
    /// Through the folder if there is one, else through the group.
    pub fn by(folder: Option<&Path>) -> Self {
        folder.map_or(Self::Group, |folder| Self::Folder(folder.to_owned()))
    }

    /// Gathers the objects of all ranks, in rank order, on rank 0. All ranks call it. An error is returned on all of
    /// them, and nothing is left in the folder.
    #[track_caller]
    pub fn gather<T: Serialize + DeserializeOwned>(
        &self,
        group: &ProcessGroup,
        object: &T,
    ) -> Result<Option<Vec<T>>, RunError> {
        match self {
            Self::Group => Ok(group.gather_object(object, 0)?),
            Self::Folder(folder) => gather_in_folder(folder, group, object),
        }
    }
}

#[track_caller]
fn gather_in_folder<T: Serialize + DeserializeOwned>(
    folder: &Path,
    group: &ProcessGroup,
    object: &T,
) -> Result<Option<Vec<T>>, RunError> {
    let name: String = group.broadcast_object((group.rank() == 0).then(unique_name).as_ref(), 0)?;
    let path = |rank: usize| folder.join(format!("{name}.{rank}"));
    let own = RemovedOnDrop(path(group.rank()));
    agree_on(group, write(&own.0, object))?;
    let read = match group.rank() {
        0 => (0..group.size()).map(|rank| read(&path(rank))).collect::<Result<Vec<_>, _>>().map(Some),
        _ => Ok(None),
    };
    // The files may only be removed after rank 0 has read them.
    agree_on(group, read)
}

/// A file that is removed when this is dropped.
struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
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
    fn large_objects_are_gathered_either_way_and_leave_no_files() {
        let folder = tempfile::tempdir().unwrap();
        for exchange in [Exchange::Group, Exchange::by(Some(folder.path()))] {
            let found = LocalGroup::run(4, |group| {
                let object = vec![format!("word {}", group.rank()); 100_000];
                Ok(exchange.gather(&group, &object).unwrap().map(|all| {
                    all.iter().enumerate().all(|(rank, object)| object[99_999] == format!("word {rank}"))
                }))
            });
            assert_eq!(found.unwrap(), [Some(true), None, None, None]);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_missing_folder_is_an_error_on_all_ranks() {
        let message = LocalGroup::run(3, |group| {
            let exchange = Exchange::Folder("/no/such/folder".into());
            Ok(exchange.gather(&group, &1).unwrap_err().to_string())
        });
        for text in message.unwrap() {
            assert!(text.contains("/no/such/folder") && text.contains("try another shared folder"), "{text}");
        }
    }
}
