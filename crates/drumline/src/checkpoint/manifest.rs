//! `manifest.json`: where the run is, and what the other files must be.
//!
//! It is checked in this order: JSON, its own checksum, format version, its fields. The checksum is that of the file with eight zeros in
//! the checksum's place. A file of another version whose checksum is right, or elsewhere, is not damaged: it is of another program.

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{CheckpointError, Refusal};
use super::folder::create_synced;
use super::scalar::{Scalar, to_scalars};
use super::state::{Mark, Score, TrainState};

/// The version of the format that this program writes and reads.
pub(super) const VERSION: u64 = 1;

/// The file.
pub(super) const MANIFEST: &str = "manifest.json";

/// What stands before the checksum's digits.
const BEFORE: &str = "{\n  \"checksum\": \"";

/// The digits while the checksum is being computed.
const NO_CHECKSUM: &str = "00000000";

/// How the tensors are laid out over the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Layout {
    /// Every rank has all tensors; they are written once.
    Replicated,
}

/// The manifest, in the order in which it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Manifest {
    checksum: String,
    format_version: u64,
    pub(super) layout: Layout,
    pub(super) world_size: usize,
    pub(super) step: u64,
    pub(super) epoch: u64,
    pub(super) best: Option<Scalar>,
    /// The metric of this state's own evaluation.
    #[serde(default)]
    pub(super) score: Option<ScoreEntry>,
    /// Its place among the best when it was saved.
    #[serde(default)]
    pub(super) place: Option<NonZeroUsize>,
    #[serde(default)]
    pub(super) loss: Option<Scalar>,
    /// Whether loss and weights were numbers. Manifests that do not say so are of programs that did not look.
    #[serde(default = "unless_known")]
    pub(super) is_finite: bool,
    pub(super) sampler: Value,
    pub(super) schedule: Value,
    pub(super) scaler: Value,
    pub(super) optimizer: OptimizerEntry,
    pub(super) config: Value,
    /// The other files, by name.
    pub(super) files: BTreeMap<String, FileEntry>,
}

/// The part of the optimizer's state that is not tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OptimizerEntry {
    pub(super) kind: String,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

fn unless_known() -> bool {
    true
}

/// A metric, and which way it is better.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct ScoreEntry {
    value: Scalar,
    smaller_is_better: bool,
}

impl From<Score> for ScoreEntry {
    fn from(Score { value, smaller_is_better }: Score) -> Self {
        Self { value: Scalar(value), smaller_is_better }
    }
}

impl From<ScoreEntry> for Score {
    fn from(ScoreEntry { value, smaller_is_better }: ScoreEntry) -> Self {
        Self { value: value.0, smaller_is_better }
    }
}

/// What a file must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileEntry {
    pub(super) bytes: u64,
    pub(super) crc32: String,
}

impl Manifest {
    pub(super) fn new(
        state: &TrainState,
        mark: Mark,
        world_size: usize,
        files: BTreeMap<String, FileEntry>,
    ) -> Self {
        let (kind, scalars) = (state.optimizer.kind.clone(), to_scalars(&state.optimizer.scalars));
        Self {
            checksum: NO_CHECKSUM.into(),
            format_version: VERSION,
            layout: Layout::Replicated,
            world_size,
            step: state.step,
            epoch: state.epoch,
            best: state.best.map(Scalar),
            score: state.score.map(Into::into),
            place: mark.place(),
            loss: state.loss.map(Scalar),
            is_finite: state.is_finite(),
            sampler: state.sampler.clone(),
            schedule: state.schedule.clone(),
            scaler: state.scaler.clone(),
            optimizer: OptimizerEntry { kind, scalars },
            config: state.config.clone(),
            files,
        }
    }

    /// The file's text, with its checksum.
    fn text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a manifest has only string keys");
        text.push('\n');
        let checksum = hex(crc32fast::hash(text.as_bytes()));
        text.replace_range(checksum_range(), &checksum);
        text
    }

    /// Writes it to `folder`, safe on disk when this returns.
    pub(super) fn write(&self, folder: &Path) -> Result<(), CheckpointError> {
        let path = folder.join(MANIFEST);
        create_synced(&path, |file| file.write_all(self.text().as_bytes()))
            .map_err(CheckpointError::write(&path))
    }

    pub(super) fn read(folder: &Path) -> Result<Self, Refusal> {
        let text = std::fs::read(folder.join(MANIFEST)).map_err(Refusal::unreadable(MANIFEST))?;
        Self::parse(&text)
    }

    fn parse(text: &[u8]) -> Result<Self, Refusal> {
        let json: Value = serde_json::from_slice(text)
            .map_err(|error| Refusal::damaged(MANIFEST, format!("not JSON: {error}")))?;
        let version = &json["format_version"];
        let other_version = (version.as_u64() != Some(VERSION)).then(|| version.to_string());
        let range = checksum_range();
        let is_placed = text.starts_with(BEFORE.as_bytes()) && text.len() > range.end;
        let mut plain = text.to_vec();
        let written = if is_placed { plain.splice(range, NO_CHECKSUM.bytes()).collect() } else { Vec::new() };
        let sum = hex(crc32fast::hash(&plain));
        let is_right = written == sum.as_bytes();
        if let Some(found) = other_version.filter(|_| is_right || !is_placed) {
            return Err(Refusal::Version { found });
        }
        if !is_right {
            let written = String::from_utf8_lossy(&written).into_owned();
            return Err(Refusal::damaged(MANIFEST, format!("its checksum is {sum}, it says `{written}`")));
        }
        serde_json::from_value(json).map_err(|error| Refusal::damaged(MANIFEST, error))
    }
}

fn checksum_range() -> std::ops::Range<usize> {
    BEFORE.len()..BEFORE.len() + NO_CHECKSUM.len()
}

/// A checksum as it is written.
pub(super) fn hex(crc32: u32) -> String {
    format!("{crc32:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let mut state = TrainState::new(Vec::new()).unwrap();
        (state.step, state.best) = (120, Some(0.1 + 0.2));
        state.sampler = serde_json::json!({"epoch": 3, "samples_seen": 640, "seed": 7});
        let file = FileEntry { bytes: 8, crc32: hex(1) };
        Manifest::new(&state, Mark::Latest, 2, BTreeMap::from([("model.safetensors".into(), file)]))
    }

    #[test]
    fn it_reads_back() {
        let text = manifest().text();
        let back = Manifest::parse(text.as_bytes()).unwrap();
        assert_eq!(back.best.unwrap().0, 0.1 + 0.2);
        assert_eq!((back.step, back.world_size, back.layout), (120, 2, Layout::Replicated));
        assert_eq!(back.sampler["samples_seen"], 640);
    }

    #[test]
    fn each_changed_byte_is_noticed() {
        let text = manifest().text();
        for at in 0..text.len() {
            for bit in [0, 4] {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= 1 << bit;
                assert!(Manifest::parse(&bytes).is_err(), "byte {at} of {text}");
            }
        }
        for len in 0..text.len() - 1 {
            assert!(Manifest::parse(&text.as_bytes()[..len]).is_err(), "{len} bytes of {text}");
        }
    }

    #[test]
    fn another_version_is_named_unless_a_byte_of_it_was_changed() {
        let elsewhere = r#"{"format_version": 2, "anything": "else"}"#;
        let alike = Manifest { format_version: 2, ..manifest() }.text();
        for newer in [elsewhere, &alike] {
            let error = Manifest::parse(newer.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), "it has format version 2, this program reads version 1");
            assert!(!error.is_damage());
        }
        let changed = manifest().text().replace("\"format_version\": 1", "\"format_version\": 9");
        assert!(Manifest::parse(changed.as_bytes()).unwrap_err().is_damage());
    }

    #[test]
    fn one_that_does_not_speak_of_its_loss_is_taken_for_finite() {
        let mut json = serde_json::to_value(manifest()).unwrap();
        for key in ["score", "place", "loss", "is_finite"] {
            assert!(json.as_object_mut().unwrap().remove(key).is_some(), "{key}");
        }
        let old: Manifest = serde_json::from_value(json).unwrap();
        assert!(old.is_finite && old.score.is_none() && old.place.is_none() && old.loss.is_none());
    }
}
