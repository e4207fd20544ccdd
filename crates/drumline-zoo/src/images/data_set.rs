//! Detects the format of a dataset from the files in its folder.

use std::path::{Path, PathBuf};

use super::config::ImageConfig;
use crate::config::DataKind;
use crate::data::{CifarKind, Split};

/// A dataset that was found: its format, and the folder of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) kind: DataKind,
    pub(super) folder: PathBuf,
}

/// The folder contains no dataset of a known format.
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

fn key(split: Split) -> &'static str {
    match split {
        Split::Train => "TRAIN.DATASET",
        Split::Test => "TEST.DATASET",
    }
}

/// The CIFAR variant, if the format is CIFAR.
fn cifar(kind: DataKind) -> Option<CifarKind> {
    match kind {
        DataKind::Cifar10 => Some(CifarKind::Cifar10),
        DataKind::Cifar100 => Some(CifarKind::Cifar100),
        DataKind::Auto | DataKind::Folder | DataKind::Dummy => None,
    }
}

/// Looks for the dataset of a split.
pub(super) fn find(config: &ImageConfig, split: Split) -> Result<Found, NoDataSet> {
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
        key: key(split),
        folder: folder.clone(),
        expected: kinds.iter().map(|kind| expected(*kind, split, name)).collect::<Vec<_>>().join(", or "),
    })
}

fn place(kind: DataKind, split: Split, folder: &Path, name: &str) -> Option<PathBuf> {
    if let Some(cifar) = cifar(kind) {
        return cifar.folder(folder, split);
    }
    let images = folder.join(name);
    let mut entries = std::fs::read_dir(&images).ok()?.flatten();
    entries.any(|entry| entry.path().is_dir()).then_some(images)
}

fn expected(kind: DataKind, split: Split, name: &str) -> String {
    match cifar(kind) {
        Some(cifar) => format!("{} ({})", cifar.files(split)[0], kind.name()),
        None => format!("{name}/CLASS/image.jpg (folder)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(folder: &Path, pairs: &[&str]) -> ImageConfig {
        let folder = folder.to_str().unwrap();
        ImageConfig::load(None, &[&["TRAIN.DATASET", folder], pairs].concat()).unwrap()
    }

    #[test]
    fn the_kind_is_detected_from_the_files() {
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
    fn an_error_names_the_missing_files_and_gives_advice() {
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
