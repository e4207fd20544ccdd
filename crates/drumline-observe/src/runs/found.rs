//! Folders of runs on disk: the given one, or those below it.
//!
//! A folder is a run's if it contains `metrics.jsonl` or `ranks/`. A folder that cannot be read contains no run.

use std::fs;
use std::path::{Path, PathBuf};

use crate::events::METRICS;
use crate::status::RANKS;

/// The most folders that a search visits: it does not walk through a data set of millions of files.
const MOST_FOLDERS: usize = 10_000;

/// Whether a run has written here.
pub fn is_run(folder: &Path) -> bool {
    folder.join(METRICS).is_file() || folder.join(RANKS).is_dir()
}

/// The folder itself if it is a run's, else the runs directly below it, by name.
///
/// ```
/// use drumline_observe::fake::FakeRun;
/// use drumline_observe::runs;
///
/// let exp = tempfile::tempdir()?;
/// FakeRun::create(&exp.path().join("a"), 1)?;
/// assert_eq!(runs::within(exp.path()), [exp.path().join("a")]);
/// assert_eq!(runs::within(&exp.path().join("a")), [exp.path().join("a")]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn within(folder: &Path) -> Vec<PathBuf> {
    below(folder, 1)
}

/// The folder itself if it is a run's, else the runs at most this many levels below it, by path.
pub fn below(folder: &Path, levels: usize) -> Vec<PathBuf> {
    let (mut found, mut looked_at) = (Vec::new(), 0);
    let mut level = vec![folder.to_owned()];
    for depth in 0..=levels {
        let (runs, others): (Vec<_>, Vec<_>) = level.into_iter().partition(|folder| is_run(folder));
        found.extend(runs);
        looked_at += others.len();
        let continues = depth < levels && looked_at < MOST_FOLDERS;
        let below = others.iter().filter(|_| continues).flat_map(|folder| folders_in(folder));
        level = below.take(MOST_FOLDERS).collect();
    }
    found.sort();
    found
}

/// The folders in a folder. Links are not followed: they may form a cycle.
fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let folders =
        entries.filter(|entry| !is_hidden(entry) && entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_itself_or_those_below_it() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let folder = root.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(METRICS), "").unwrap();
        };
        ["exp/b", "exp/a", "exp/deep/c", "exp/.hidden/d"].into_iter().for_each(make);
        fs::create_dir_all(root.path().join("exp/r/ranks")).unwrap();
        let exp = root.path().join("exp");
        let names = |found: Vec<PathBuf>| {
            let name = |path: PathBuf| path.strip_prefix(root.path()).unwrap().display().to_string();
            found.into_iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(within(&exp)), ["exp/a", "exp/b", "exp/r"]);
        assert_eq!(names(below(root.path(), 3)), ["exp/a", "exp/b", "exp/deep/c", "exp/r"]);
        assert_eq!(names(within(root.path())), Vec::<String>::new());
        make("exp");
        assert_eq!(names(within(&exp)), ["exp"], "a run is not searched for others");
        assert!(within(&root.path().join("none")).is_empty());
    }
}
