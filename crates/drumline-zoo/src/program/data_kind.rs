//! Which kind of data set lies in a folder, told from its files.

use std::path::{Path, PathBuf};

use crate::config::{Config, DataKind};

/// A data set that is there: its kind, and the folder with its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: DataKind,
    pub(super) folder: PathBuf,
}

/// Nothing that is known lies there.
#[derive(Debug, thiserror::Error)]
#[error(
    "{key}: no data set in {0}: expected {expected}; \
     try drumline data synth-cifar --out {0}, another {key}, or MODEL.DUMMY_INPUT True", folder.display()
)]
pub(super) struct NoDataSet {
    key: &'static str,
    folder: PathBuf,
    expected: String,
}

/// Which of the two data sets is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    Train,
    Test,
}

impl Split {
    fn key(self) -> &'static str {
        match self {
            Self::Train => "TRAIN.DATASET",
            Self::Test => "TEST.DATASET",
        }
    }
}

/// The files that make a kind, and the folder inside an unpacked archive that may hold them.
fn marks(kind: DataKind, split: Split) -> (&'static str, &'static [&'static str]) {
    match (kind, split) {
        (DataKind::Cifar100, Split::Train) => ("cifar-100-binary", &["train.bin"]),
        (DataKind::Cifar100, Split::Test) => ("cifar-100-binary", &["test.bin"]),
        (_, Split::Train) => ("cifar-10-batches-bin", &["data_batch_1.bin"]),
        (_, Split::Test) => ("cifar-10-batches-bin", &["test_batch.bin"]),
    }
}

/// Looks for the data set of a split.
pub(super) fn find(config: &Config, split: Split) -> Result<Found, NoDataSet> {
    let (folder, name) = match split {
        Split::Train => (&config.train.dataset, &config.train.split),
        Split::Test => (&config.test.dataset, &config.test.split),
    };
    let wanted = if config.model.dummy_input { DataKind::Dummy } else { config.data.kind };
    let kinds = match wanted {
        DataKind::Auto => &[DataKind::Cifar10, DataKind::Cifar100, DataKind::Folder][..],
        DataKind::Dummy => return Ok(Found { kind: DataKind::Dummy, folder: folder.clone() }),
        ref one => std::slice::from_ref(one),
    };
    let there = |kind: &DataKind| Some(Found { kind: *kind, folder: place(*kind, split, folder, name)? });
    kinds.iter().find_map(there).ok_or_else(|| NoDataSet {
        key: split.key(),
        folder: folder.clone(),
        expected: kinds.iter().map(|kind| expected(*kind, split, name)).collect::<Vec<_>>().join(", or "),
    })
}

fn place(kind: DataKind, split: Split, folder: &Path, name: &str) -> Option<PathBuf> {
    if kind == DataKind::Folder {
        let images = folder.join(name);
        let mut entries = std::fs::read_dir(&images).ok()?.flatten();
        return entries.any(|entry| entry.path().is_dir()).then_some(images);
    }
    let (inner, files) = marks(kind, split);
    let holds = |folder: &PathBuf| files.iter().all(|file| folder.join(file).is_file());
    [folder.to_owned(), folder.join(inner)].into_iter().find(holds)
}

fn expected(kind: DataKind, split: Split, name: &str) -> String {
    match kind {
        DataKind::Folder => format!("{name}/CLASS/image.jpg (folder)"),
        _ => format!("{} ({})", marks(kind, split).1.join(" and "), kind.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(folder: &Path, pairs: &[&str]) -> Config {
        let folder = folder.to_str().unwrap();
        Config::load(None, &[&["TRAIN.DATASET", folder], pairs].concat()).unwrap()
    }

    #[test]
    fn the_files_tell_the_kind() {
        for (file, kind) in [
            ("data_batch_1.bin", DataKind::Cifar10),
            ("cifar-10-batches-bin/data_batch_1.bin", DataKind::Cifar10),
            ("train.bin", DataKind::Cifar100),
            ("train/cat/1.jpg", DataKind::Folder),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
            assert_eq!(find(&config(dir.path(), &[]), Split::Train).unwrap().kind, kind, "{file}");
        }
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_try() {
        let dir = tempfile::tempdir().unwrap();
        let said = find(&config(dir.path(), &[]), Split::Test).unwrap_err().to_string();
        for words in ["TEST.DATASET", "test_batch.bin (cifar10)", "val/CLASS/image.jpg", "try drumline data"]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
        let said =
            find(&config(dir.path(), &["DATA.KIND", "cifar100"]), Split::Train).unwrap_err().to_string();
        assert!(said.contains("expected train.bin (cifar100); "), "{said}");
        let dummy = find(&config(dir.path(), &["MODEL.DUMMY_INPUT", "True"]), Split::Train).unwrap();
        assert_eq!(dummy.kind, DataKind::Dummy);
    }
}
