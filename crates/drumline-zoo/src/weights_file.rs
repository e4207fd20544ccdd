//! Finds the weights that a path refers to.

use std::path::{Path, PathBuf};

use anyhow::bail;
use drumline::checkpoint::Checkpoints;

/// The weights file of a path. The path may be a file, a checkpoint, a folder of checkpoints (the best is used, or the
/// last if the run has evaluated none), or the run's folder above it. If several ranks wrote the weights, each its own
/// file, the folder of these files is returned.
pub(crate) fn weights_file(path: &Path) -> anyhow::Result<PathBuf> {
    if let Some(file) = weights_in(path)? {
        return Ok(file);
    }
    let mut below = Vec::new();
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
        below.extend(weights_in(&folder)?);
    }
    below.sort();
    match below.as_slice() {
        [file] => Ok(file.clone()),
        [] => bail!(
            "no weights in {} or one level down; try a .safetensors file, a checkpoint, or the folder of a training's checkpoints",
            path.display()
        ),
        [first, second, ..] => bail!(
            "several weights below {}, such as {} and {}; try the path of one",
            path.display(),
            first.display(),
            second.display()
        ),
    }
}

fn weights_in(path: &Path) -> anyhow::Result<Option<PathBuf>> {
    let places = [path.to_owned(), path.join("model.safetensors")];
    match places.into_iter().find(|place| place.is_file()) {
        Some(file) => Ok(Some(file)),
        None if has_shards(path) => Ok(Some(path.to_owned())),
        None => Ok(Checkpoints::new(path).read_only().model_file()?),
    }
}

/// Whether a folder has the files of several ranks, with the names that PyTorch's distributed checkpoints give them.
pub(crate) fn has_shards(folder: &Path) -> bool {
    let is_shard = |name: &str| name.starts_with("shard-") && name.ends_with(".safetensors");
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_str().is_some_and(is_shard))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_found_one_level_down_if_unambiguous() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("nmt");
        let model = |path: &str| run.join(path).join("model.safetensors");
        let make = |path: &str| {
            std::fs::create_dir_all(run.join(path)).unwrap();
            std::fs::write(model(path), "").unwrap();
        };
        std::fs::create_dir_all(run.join("log")).unwrap();
        let said = weights_file(&run).unwrap_err().to_string();
        assert!(said.contains("or one level down; try"), "{said}");
        make("step-3");
        assert_eq!(weights_file(&run).unwrap(), model("step-3"));
        assert_eq!(weights_file(&run.join("step-3")).unwrap(), model("step-3"), "control: named itself");
        assert!(weights_file(folder.path()).is_err(), "not two levels down");
        make("step-4");
        let said = weights_file(&run).unwrap_err().to_string();
        assert!(said.contains("several weights") && said.contains("try the path of one"), "{said}");
    }
}
