//! Format 1, which is still read but no longer written: the files of one rank, with complete tensors that only the
//! headers name. The trainer's state was in `schedule`, that of the `Accelerator` in `config`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::super::error::Refusal;
use super::super::index::Index;
use super::super::scalar::Scalar;
use super::super::section::Section;
use super::super::shard_reader::add_header;
use super::super::whole_files;
use super::{AxisEntry, FileEntry, MANIFEST, Manifest, OptimizerEntry, ScoreEntry};

/// The manifest of format 1.
#[derive(Debug, Deserialize)]
pub(super) struct Format1 {
    checksum: String,
    world_size: usize,
    step: u64,
    epoch: u64,
    best: Option<Scalar>,
    #[serde(default)]
    score: Option<ScoreEntry>,
    #[serde(default)]
    place: Option<NonZeroUsize>,
    #[serde(default)]
    loss: Option<Scalar>,
    /// Older manifests do not have it.
    #[serde(default = "unless_known")]
    is_finite: bool,
    sampler: Value,
    schedule: Value,
    scaler: Value,
    optimizer: OptimizerEntry,
    config: Value,
    files: BTreeMap<String, File1>,
}

/// The size and checksum of a file.
#[derive(Debug, Deserialize)]
struct File1 {
    bytes: u64,
    crc32: String,
}

fn unless_known() -> bool {
    true
}

impl Format1 {
    /// Converts it to format 2. What was saved in `schedule` or `config` is also found there.
    pub(super) fn into_manifest(self) -> Result<Manifest, Refusal> {
        let mut files = BTreeMap::new();
        for section in Section::ALL {
            let name = section.file();
            match self.files.get(&name) {
                Some(File1 { bytes, crc32 }) => {
                    files.insert(name, FileEntry { section, bytes: *bytes, crc32: crc32.clone() });
                }
                None if section == Section::Trained => {}
                None => return Err(Refusal::damaged(MANIFEST, &format!("it does not list {name}"))),
            }
        }
        Ok(Manifest {
            checksum: self.checksum,
            format_version: 1,
            mesh: vec![AxisEntry { axis: "dp".into(), size: self.world_size }],
            step: self.step,
            epoch: self.epoch,
            best: self.best,
            score: self.score,
            place: self.place,
            loss: self.loss,
            is_finite: self.is_finite,
            sampler: self.sampler,
            scaler: self.scaler,
            trainer: self.schedule.clone(),
            schedule: self.schedule,
            accelerator: self.config.clone(),
            optimizer: self.optimizer,
            config: self.config,
            tensors: BTreeMap::new(),
            files,
        })
    }
}

/// The tensors of a section, from the headers of its files.
pub(super) fn index(manifest: &Manifest, folder: &Path, section: Section) -> Result<Index, Refusal> {
    let mut index = Index::default();
    for (file, entry) in manifest.files_of(section) {
        if let Err(reason) = add_header(&mut index, folder, file) {
            // A wrong header means wrong bytes: size and checksum give the better reason.
            whole_files::check(folder, file, entry)?;
            return Err(reason);
        }
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old() -> Value {
        let file = serde_json::json!({ "bytes": 8, "crc32": "00000001" });
        serde_json::json!({
            "checksum": "00000000", "format_version": 1, "layout": "replicated", "world_size": 3,
            "step": 120, "epoch": 2, "best": null,
            "sampler": { "epoch": 2 }, "schedule": { "evaluated_at": 120 }, "scaler": null, "config": { "steps": [7] },
            "optimizer": { "kind": "sgd", "scalars": { "lr": 0.1 } },
            "files": { "model.safetensors": file, "optimizer.safetensors": file, "rng.safetensors": file },
        })
    }

    #[test]
    fn it_is_converted_to_format_2() {
        let manifest = Format1::deserialize(old()).unwrap().into_manifest().unwrap();
        assert_eq!((manifest.step, manifest.mesh().unwrap().num_ranks()), (120, 3));
        assert_eq!(
            (&manifest.trainer["evaluated_at"], &manifest.accelerator["steps"][0]),
            (&120.into(), &7.into())
        );
        assert_eq!((&manifest.schedule, &manifest.config), (&manifest.trainer, &manifest.accelerator));
        assert!(
            manifest.is_finite
                && manifest.score.is_none()
                && manifest.place.is_none()
                && manifest.loss.is_none()
        );
        assert_eq!(manifest.files_of(Section::Rng).len(), 1);
        assert_eq!(manifest.files_of(Section::Trained).len(), 0);
    }

    #[test]
    fn one_that_lacks_a_file_is_damaged() {
        let mut json = old();
        json["files"].as_object_mut().unwrap().remove("rng.safetensors");
        let error = Format1::deserialize(json).unwrap().into_manifest().unwrap_err();
        assert_eq!(error.to_string(), "manifest.json is damaged: it does not list rng.safetensors");
    }
}
