//! Names of checkpoints, and files and folders that are safe on disk when a call returns.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// The prefix of what is being written or deleted. Nobody reads it.
pub(super) const UNFINISHED: &str = ".tmp-";

/// The prefix of damaged checkpoints.
pub(super) const BAD: &str = "bad-";

/// The link to the latest checkpoint.
pub(super) const LATEST: &str = "latest";

/// The link to the best checkpoint.
pub(super) const BEST: &str = "best";

/// The link to the checkpoint at this place among the best: `best`, `best-2`, …
pub(super) fn best(place: usize) -> String {
    if place == 1 { BEST.to_owned() } else { format!("{BEST}-{place}") }
}

/// A checkpoint's name: `step-00000120`, or `step-00000120-2` for the second of that step. Names are ordered by their
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) step: u64,
    /// 1 for the first checkpoint of a step.
    pub(super) turn: u64,
}

impl Name {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.bytes().all(|c| c.is_ascii_digit()).then(|| text.parse().ok())?;
        let rest = text.strip_prefix("step-")?;
        let (step, turn) = match rest.split_once('-') {
            Some((step, turn)) => (number(step)?, number(turn)?),
            None => (number(rest)?, 1),
        };
        let name = Self { step, turn };
        (name.to_string() == text).then_some(name)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "step-{:08}", self.step)?;
        if self.turn > 1 { write!(f, "-{}", self.turn) } else { Ok(()) }
    }
}

/// The checkpoints in `dir`, oldest first; none if there is no such folder.
pub(super) fn checkpoints(dir: &Path) -> io::Result<Vec<Name>> {
    let mut names: Vec<_> = entries(dir)?.iter().filter_map(|name| Name::parse(name)).collect();
    names.sort();
    Ok(names)
}

/// The names of all entries of `dir`.
pub(super) fn entries(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// The checkpoint that a link names.
pub(super) fn linked(dir: &Path, link: &str) -> Option<Name> {
    Name::parse(fs::read_link(dir.join(link)).ok()?.to_str()?)
}

/// The checkpoints that `best`, `best-2`, … link to, up to the first missing link.
pub(super) fn linked_best(dir: &Path) -> Vec<Name> {
    (1..).map_while(|place| linked(dir, &best(place))).collect()
}

/// Renames a damaged checkpoint, so that nobody loads it again. Returns `None` if it does not exist.
pub(super) fn set_aside(dir: &Path, name: Name) -> io::Result<Option<PathBuf>> {
    let names = (1..).map(|turn| match turn {
        1 => format!("{BAD}{name}"),
        _ => format!("{BAD}{name}.{turn}"),
    });
    let aside = names.map(|aside| dir.join(aside)).find(|aside| aside.symlink_metadata().is_err());
    let aside = aside.expect("numbers do not end");
    match fs::rename(dir.join(name.to_string()), &aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        renamed => renamed.and_then(|()| sync_folder(dir)).map(|()| Some(aside)),
    }
}

/// The steps of checkpoints that were renamed because they are damaged.
pub(super) fn bad_steps(dir: &Path) -> Vec<u64> {
    let step = |entry: &String| {
        let name = entry.strip_prefix(BAD)?;
        Some(Name::parse(name.split('.').next()?)?.step)
    };
    entries(dir).unwrap_or_default().iter().filter_map(step).collect()
}

/// Makes `link` point to the checkpoint, atomically.
pub(super) fn point(dir: &Path, link: &str, name: Name) -> io::Result<()> {
    let beside = dir.join(format!("{UNFINISHED}{link}"));
    // A crash may have left it behind.
    let _ = fs::remove_file(&beside);
    std::os::unix::fs::symlink(name.to_string(), &beside)?;
    fs::rename(&beside, dir.join(link))?;
    sync_folder(dir)
}

/// Creates a file with what `write` writes, and syncs it to disk.
pub(super) fn create_synced<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<T, E>,
) -> Result<T, E> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let written = write(&mut file)?;
    file.sync_all()?;
    Ok(written)
}

/// Syncs the entries of a folder to disk.
pub(super) fn sync_folder(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates a folder and its parents, and syncs their entries to disk.
pub(super) fn create_folder(dir: &Path) -> io::Result<()> {
    let mut missing: Vec<PathBuf> =
        dir.ancestors().take_while(|dir| !dir.exists()).map(Path::to_owned).collect();
    fs::create_dir_all(dir)?;
    missing.retain(|dir| !dir.as_os_str().is_empty());
    for made in missing {
        let above = made.parent().filter(|above| !above.as_os_str().is_empty());
        sync_folder(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_checkpoints_are_parsed() {
        for name in [(0, 1), (120, 1), (120, 2), (123_456_789_012, 11)] {
            let name = Name { step: name.0, turn: name.1 };
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        assert_eq!(Name { step: 120, turn: 2 }.to_string(), "step-00000120-2");
        for text in [
            "step-",
            "step-1",
            "step-00000120-1",
            "step-00000120-",
            "step-+0000120",
            "latest",
            ".tmp-step-00000120",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_link_moves_although_a_crash_left_its_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = [Name { step: 1, turn: 1 }, Name { step: 2, turn: 1 }];
        assert_eq!(linked(dir.path(), LATEST), None);
        point(dir.path(), LATEST, first).unwrap();
        fs::write(dir.path().join(".tmp-latest"), "left behind").unwrap();
        point(dir.path(), LATEST, second).unwrap();
        assert_eq!(linked(dir.path(), LATEST), Some(second));
        assert_eq!(entries(dir.path()).unwrap(), ["latest"]);
    }
}
