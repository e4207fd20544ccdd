//! `manifest.json`: the state of the run, the tensors, and the size and checksum of the other files.
//!
//! It is checked in this order: JSON, its own checksum, format version, its fields. The checksum is that of the file
//! with eight zeros in place of the checksum. A file of a later version, whose checksum is correct or in another place,
//! is not damaged: another program wrote it.
//!
//! Format 2 is written; format 1 is read as well (`manifest/format_1.rs`).

mod format_1;
mod lines;

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;

use ::safetensors::tensor::Dtype;
use drumline_comm::{Axis, MeshShape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{CheckpointError, Refusal};
use super::folder::create_synced;
use super::index::{Chunk, Index, TensorEntry};
use super::scalar::{Scalar, to_scalars};
use super::section::Section;
use super::shard_writer::Shard;
use super::state::{Mark, RunState, Score};
use format_1::Format1;

/// The version of the format that this program writes.
const VERSION: u64 = 2;

/// The file.
pub(super) const MANIFEST: &str = "manifest.json";

/// The text before the digits of the checksum.
const BEFORE: &str = "{\n  \"checksum\": \"";

/// The digits for which the checksum is computed.
const NO_CHECKSUM: &str = "00000000";

/// The manifest. Fields are written in this order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Manifest {
    checksum: String,
    format_version: u64,
    /// The mesh of the ranks that saved it, the outermost axis first.
    mesh: Vec<AxisEntry>,
    pub(super) step: u64,
    pub(super) epoch: u64,
    pub(super) best: Option<Scalar>,
    /// The metric of the evaluation of this state.
    pub(super) score: Option<ScoreEntry>,
    /// Its place among the best when it was saved.
    pub(super) place: Option<NonZeroUsize>,
    pub(super) loss: Option<Scalar>,
    /// Whether loss and weights were finite.
    pub(super) is_finite: bool,
    pub(super) sampler: Value,
    pub(super) scaler: Value,
    pub(super) schedule: Value,
    pub(super) trainer: Value,
    pub(super) accelerator: Value,
    pub(super) optimizer: OptimizerEntry,
    pub(super) config: Value,
    /// Each section's tensors, and where they are.
    tensors: BTreeMap<Section, Index>,
    /// The other files, by name.
    pub(super) files: BTreeMap<String, FileEntry>,
}

/// An axis of the mesh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct AxisEntry {
    axis: String,
    size: usize,
}

/// The part of the optimizer's state that is not tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OptimizerEntry {
    pub(super) kind: String,
    pub(super) scalars: BTreeMap<String, Scalar>,
    /// The slots of each parameter: the tensors `<parameter>.<slot>`.
    #[serde(default)]
    parameters: BTreeMap<String, Vec<String>>,
}

impl OptimizerEntry {
    fn of(state: &RunState) -> Self {
        let parameters = slots_of(state.optimizer.tensors.iter().map(|named| named.name.as_str()));
        let (kind, scalars) = (state.optimizer.kind.clone(), to_scalars(&state.optimizer.scalars));
        Self { kind, scalars, parameters }
    }
}

/// The slots of each parameter, from the names of tensors.
fn slots_of<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<String, Vec<String>> {
    let mut parameters: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        let (parameter, slot) = name.rsplit_once('.').unwrap_or((name, ""));
        parameters.entry(parameter.to_owned()).or_default().push(slot.to_owned());
    }
    parameters
}

/// A metric and its direction.
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

/// The section, size and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileEntry {
    pub(super) section: Section,
    pub(super) bytes: u64,
    pub(super) crc32: String,
}

impl Manifest {
    /// The manifest of a state whose tensors are in these files, which must be complete.
    pub(super) fn new(
        state: &RunState,
        mark: Mark,
        mesh: MeshShape,
        shards: Vec<Shard>,
    ) -> Result<Self, CheckpointError> {
        let (mut tensors, mut files) = (BTreeMap::<Section, Index>::new(), BTreeMap::new());
        for Shard { section, file, entry, index } in shards {
            tensors.entry(section).or_default().merge(index)?;
            files.insert(file, entry);
        }
        tensors.values().try_for_each(Index::check)?;
        Ok(Self {
            checksum: NO_CHECKSUM.into(),
            format_version: VERSION,
            mesh: axes_of(mesh),
            step: state.step,
            epoch: state.epoch,
            best: state.best.map(Scalar),
            score: state.score.map(Into::into),
            place: mark.place(),
            loss: state.loss.map(Scalar),
            is_finite: state.is_finite(),
            sampler: state.sampler.clone(),
            scaler: state.scaler.clone(),
            schedule: state.schedule.clone(),
            trainer: state.trainer.clone(),
            accelerator: state.accelerator.clone(),
            optimizer: OptimizerEntry::of(state),
            config: state.config.clone(),
            tensors,
            files,
        })
    }

    /// The manifest of a state of which each rank has written its part.
    pub(super) fn of_shards(
        state: &RunState,
        mark: Mark,
        mesh: MeshShape,
        shards: Vec<Shard>,
        is_finite: bool,
    ) -> Result<Self, CheckpointError> {
        // Rank 0 has checked its own part only.
        let mut manifest = Self::new(&RunState { model: Vec::new(), ..state.clone() }, mark, mesh, shards)?;
        manifest.is_finite = is_finite;
        let tensors = manifest.tensors.get(&Section::Optimizer);
        let names = tensors.into_iter().flat_map(Index::tensors).map(|(name, _)| name.as_str());
        manifest.optimizer.parameters = slots_of(names);
        Ok(manifest)
    }

    /// The mesh of the ranks that saved it.
    pub(super) fn mesh(&self) -> Result<MeshShape, Refusal> {
        self.mesh.iter().try_fold(MeshShape::default(), |shape, AxisEntry { axis, size }| {
            let axis: Axis = axis.parse().map_err(|error| Refusal::damaged(MANIFEST, &error))?;
            Ok(shape.with(axis, *size))
        })
    }

    /// The files of a section.
    pub(super) fn files_of(&self, section: Section) -> BTreeMap<&str, &FileEntry> {
        let own = self.files.iter().filter(|(_, entry)| entry.section == section);
        own.map(|(name, entry)| (name.as_str(), entry)).collect()
    }

    /// The tensors of a section of the checkpoint in `folder`, and where they are.
    pub(super) fn index(&self, folder: &Path, section: Section) -> Result<Index, Refusal> {
        if self.format_version == 1 {
            return format_1::index(self, folder, section);
        }
        Ok(self.tensors.get(&section).cloned().unwrap_or_default())
    }

    /// The manifest without the index of tensors, which only the reader of the files needs.
    pub(super) fn without_tensors(self) -> Self {
        Self { tensors: BTreeMap::new(), ..self }
    }

    /// The file's text, with its checksum.
    fn text(&self) -> String {
        let mut text = lines::to_string(self);
        let checksum = hex(crc32fast::hash(text.as_bytes()));
        text.replace_range(checksum_range(), &checksum);
        text
    }

    /// Writes it to `folder`, and syncs it to disk.
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
            .map_err(|error| Refusal::damaged(MANIFEST, &format!("not JSON: {error}")))?;
        let version = json["format_version"].clone();
        let is_known = matches!(version.as_u64(), Some(1 | VERSION));
        let range = checksum_range();
        let is_placed = text.starts_with(BEFORE.as_bytes()) && text.len() > range.end;
        let mut plain = text.to_vec();
        let written = if is_placed { plain.splice(range, NO_CHECKSUM.bytes()).collect() } else { Vec::new() };
        let sum = hex(crc32fast::hash(&plain));
        let is_right = written == sum.as_bytes();
        if !is_known && (is_right || !is_placed) {
            return Err(Refusal::Version { found: version.to_string() });
        }
        if !is_right {
            let written = String::from_utf8_lossy(&written).into_owned();
            return Err(Refusal::damaged(MANIFEST, &format!("its checksum is {sum}, it says `{written}`")));
        }
        if version == 1 {
            let old: Format1 =
                serde_json::from_value(json).map_err(|error| Refusal::damaged(MANIFEST, &error))?;
            return old.into_manifest();
        }
        let new: Self = serde_json::from_value(json).map_err(|error| Refusal::damaged(MANIFEST, &error))?;
        new.checked()
    }

    /// Returns an error unless the mesh is valid and all tensors are complete, within files that are listed.
    fn checked(self) -> Result<Self, Refusal> {
        self.mesh()?;
        let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|last| last == name);
        if let Some(name) = self.files.keys().find(|name| !is_plain(name)) {
            return Err(Refusal::damaged(
                MANIFEST,
                &format!("it lists `{name}`, which is not in its folder"),
            ));
        }
        for index in self.tensors.values() {
            index.check().map_err(|error| Refusal::damaged(MANIFEST, &error))?;
            for (_, TensorEntry { dtype, chunks, .. }) in index.tensors() {
                chunks.iter().try_for_each(|chunk| self.check_chunk(chunk, *dtype))?;
            }
        }
        Ok(self)
    }

    fn check_chunk(&self, chunk: &Chunk, dtype: Dtype) -> Result<(), Refusal> {
        let Some(file) = self.files.get(&chunk.file) else {
            return Err(Refusal::damaged(MANIFEST, &format!("it does not list {}", chunk.file)));
        };
        if chunk.start.checked_add(chunk.num_bytes(dtype)).is_none_or(|end| end > file.bytes) {
            return Err(Refusal::damaged(MANIFEST, &format!("a tensor reaches out of {}", chunk.file)));
        }
        Ok(())
    }
}

fn axes_of(mesh: MeshShape) -> Vec<AxisEntry> {
    let entry = |axis: Axis| AxisEntry { axis: axis.name().to_owned(), size: mesh.size(axis) };
    let entries = Axis::ALL.into_iter().map(entry);
    entries.filter(|entry| entry.size > 1 || entry.axis == Axis::Dp.name()).collect()
}

fn checksum_range() -> std::ops::Range<usize> {
    BEFORE.len()..BEFORE.len() + NO_CHECKSUM.len()
}

/// A checksum as text.
pub(super) fn hex(crc32: u32) -> String {
    format!("{crc32:08x}")
}

#[cfg(test)]
mod tests {
    use super::super::safetensors::Entry;
    use drumline_torch::Named;

    use super::*;

    /// A file with some of the four rows of `w`.
    fn shard(file: &str, rows: std::ops::Range<usize>) -> Shard {
        let (shape, offsets) = (vec![rows.len(), 2], vec![rows.start, 0]);
        let part = Entry {
            name: "w".into(),
            dtype: Dtype::F32,
            shape,
            offsets,
            bytes: 80..80 + 8 * rows.len() as u64,
        };
        let mut index = Index::default();
        index.add(file, &part, Some(&[4, 2]), Some(hex(7))).unwrap();
        let entry = FileEntry { section: Section::Model, bytes: 112, crc32: hex(1) };
        Shard { section: Section::Model, file: file.into(), entry, index }
    }

    fn state() -> RunState {
        let mut state = RunState::new(Vec::new()).unwrap();
        (state.step, state.best) = (120, Some(0.1 + 0.2));
        state.sampler = serde_json::json!({"epoch": 3, "samples_seen": 640, "seed": 7});
        state.trainer = serde_json::json!({"evaluated_at": 120});
        state.optimizer.tensors = ["w.exp_avg", "w.step"]
            .map(|name| Named { name: name.into(), tensor: tch::Tensor::from(1f32) })
            .into();
        state
    }

    fn manifest() -> Manifest {
        let mesh = MeshShape::default().with(Axis::Dp, 2);
        Manifest::new(&state(), Mark::Latest, mesh, vec![shard("a", 0..3), shard("b", 3..4)]).unwrap()
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let text = manifest().text();
        let back = Manifest::parse(text.as_bytes()).unwrap();
        assert_eq!(back.best.unwrap().0, 0.1 + 0.2);
        assert_eq!((back.step, back.mesh().unwrap().num_ranks()), (120, 2));
        assert_eq!(
            (&back.sampler["samples_seen"], &back.trainer["evaluated_at"]),
            (&640.into(), &120.into())
        );
        assert_eq!(back.optimizer.parameters["w"], ["exp_avg", "step"]);
        assert_eq!(back.tensors, manifest().tensors);
        let folder = Path::new("nowhere");
        assert_eq!(back.index(folder, Section::Model).unwrap(), manifest().tensors[&Section::Model]);
        assert_eq!(back.index(folder, Section::Rng).unwrap(), Index::default());
    }

    #[test]
    fn each_tensor_has_a_line() {
        let text = manifest().text();
        let line = text.lines().find(|line| line.contains("\"w\": {\"dtype\"")).unwrap();
        let expected = r#"      "w": {"dtype":"F32","shape":[4,2],"chunks":[{"file":"a","offsets":[0,0],"shape":[3,2],"start":80,"crc32":"00000007"},"#;
        assert!(line.starts_with(expected), "{text}");
    }

    #[test]
    fn each_changed_byte_is_found() {
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
    fn a_later_version_is_named_unless_a_byte_of_it_was_changed() {
        let elsewhere = r#"{"format_version": 3, "anything": "else"}"#;
        let alike = Manifest { format_version: 3, ..manifest() }.text();
        for newer in [elsewhere, &alike] {
            let error = Manifest::parse(newer.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), "it has format version 3, this program reads versions 1 and 2");
            assert!(!error.is_damage());
        }
        let changed = manifest().text().replace("\"format_version\": 2", "\"format_version\": 9");
        assert!(Manifest::parse(changed.as_bytes()).unwrap_err().is_damage());
    }

    #[test]
    fn files_with_incomplete_tensors_are_refused() {
        let shards = |shards: Vec<Shard>| Manifest::new(&state(), Mark::Latest, MeshShape::default(), shards);
        let error = shards(vec![shard("a", 0..3)]).unwrap_err().to_string();
        assert_eq!(error, "tensor `w` of shape [4, 2] is not complete: 6 of 8 elements are in a");
        let error = shards(vec![shard("a", 0..3), shard("b", 2..4)]).unwrap_err().to_string();
        assert_eq!(error, "tensor `w` is in several files: a, b");
        let mut unlisted = manifest();
        unlisted.files.remove("b");
        let error = Manifest::parse(unlisted.text().as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "manifest.json is damaged: it does not list b");
        let mut short = manifest();
        short.files.get_mut("b").unwrap().bytes = 87;
        let error = Manifest::parse(short.text().as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "manifest.json is damaged: a tensor reaches out of b");
        let mut elsewhere = manifest();
        for name in ["../b", "/b", "..", "c/b", ""] {
            elsewhere.files.insert(name.into(), elsewhere.files["b"].clone());
            let error = Manifest::parse(elsewhere.text().as_bytes()).unwrap_err().to_string();
            assert!(error.ends_with("`, which is not in its folder"), "{error}");
            elsewhere.files.remove(name);
        }
    }
}
