//! Saving: write to a temporary folder, rename it, then make it the latest.
//!
//! ```text
//!   DIR/.tmp-step-00000120/*   each file written and fsynced, then the folder
//!   DIR/step-00000120          renamed, DIR fsynced
//!   DIR/latest, DIR/best…      moved, DIR fsynced
//!   DIR/step-00000040          deleted
//! ```
//! Wherever this is interrupted, the checkpoint before is complete and `latest` points to a complete one.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use drumline_comm::{Axis, MeshShape, ProcessGroup};
use drumline_torch::{Named, RngState};
use serde::{Deserialize, Serialize};
use tch::Device;

use super::error::CheckpointError;
use super::folder::{self, LATEST, Name, UNFINISHED};
use super::manifest::Manifest;
use super::on_rank_zero::on_rank_zero;
use super::safetensors::{self, Made, write_made};
use super::section::{Section, with_suffix};
use super::shard_writer::{Shard, ShardWriter, TensorPart};
use super::shards::Draft;
use super::state::{Mark, RunState};
use super::{Checkpoints, Role};
use super::{rng, rotate};

/// A checkpoint that is safe on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Saved {
    /// Its folder, as rank 0 sees it.
    pub path: PathBuf,
    /// The checkpoints that were deleted because of it.
    pub deleted: Vec<String>,
}

/// A section of a checkpoint that is imported: its tensors are made while they are written.
pub(super) struct Import<'a> {
    pub(super) section: Section,
    pub(super) made: Made<'a>,
}

/// What each rank contributes: its random number generators, and the values that must be the same on all ranks.
#[derive(Serialize, Deserialize)]
struct Part {
    agreed: Vec<(String, String)>,
    cpu: Vec<u8>,
    cuda: Vec<Vec<u8>>,
}

impl Part {
    fn of(state: &RunState) -> Self {
        let best = state.best.map_or("none".into(), |best| best.to_string());
        let agreed = [
            ("step", state.step.to_string()),
            ("epoch", state.epoch.to_string()),
            ("best metric", best),
            ("sampler position", state.sampler.to_string()),
        ];
        let agreed = agreed.map(|(what, value)| (what.to_owned(), value)).to_vec();
        Self { agreed, cpu: state.rng.cpu.clone(), cuda: state.rng.cuda.clone() }
    }
}

/// Returns an error that lists what differs between ranks.
fn check_agreement(parts: &[Part]) -> Result<(), CheckpointError> {
    let Some((first, others)) = parts.split_first() else { return Ok(()) };
    let mut differences = Vec::new();
    for (rank, part) in others.iter().enumerate() {
        let pairs = first.agreed.iter().zip(&part.agreed).filter(|(first, other)| first != other);
        differences.extend(pairs.map(|((what, first), (_, other))| {
            format!("{what}: {first} on rank 0, {other} on rank {}", rank + 1)
        }));
    }
    if differences.is_empty() { Ok(()) } else { Err(CheckpointError::Disagreement { differences }) }
}

impl Checkpoints {
    /// Saves the state of all ranks, which call this together. When it returns, the checkpoint is safe on disk.
    ///
    /// An error is returned on all ranks. The earlier checkpoints are unchanged, and the group can still be used.
    #[track_caller]
    pub fn save(&self, state: &RunState, mark: Mark, group: &ProcessGroup) -> Result<Saved, CheckpointError> {
        let parts = group.gather_object(&Part::of(state), 0)?.unwrap_or_default();
        let checked = check_agreement(&parts);
        let generators = parts.into_iter().map(|part| RngState { cpu: part.cpu, cuda: part.cuda });
        let generators: Vec<_> = generators.collect();
        if let Some(layout) = &state.layout {
            return self.save_shards(&Draft { state, layout, generators, mark }, checked, group);
        }
        let state = settled(state);
        let saved = on_rank_zero(group, move || {
            checked?;
            self.write(&state, &generators, mark)
        })?;
        Ok(group.broadcast_object(saved.as_ref(), 0)?)
    }

    /// Rank 0's part.
    fn write(&self, state: &RunState, generators: &[RngState], mark: Mark) -> Result<Saved, CheckpointError> {
        self.write_beside(state.step, mark, |folder| write_files(folder, state, generators, mark))
    }

    /// Makes the latest checkpoint of the files that `write` puts into a new folder.
    fn write_beside(
        &self,
        step: u64,
        mark: Mark,
        write: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<Saved, CheckpointError> {
        let name = self.new_name(step)?;
        let beside = self.beside(name);
        let placed = write(&beside).and_then(|()| self.place(&beside, name));
        if let Err(error) = placed {
            // On a full disk the space is needed. What cannot be removed now is removed by the next save.
            let _ = std::fs::remove_dir_all(&beside);
            return Err(error);
        }
        self.publish(name, mark)
    }

    /// Saves a state whose tensors another system has written, by a single process.
    pub(super) fn import(
        &self,
        state: &RunState,
        sections: Vec<Import<'_>>,
    ) -> Result<Saved, CheckpointError> {
        self.write_beside(state.step, Mark::Latest, |folder| import_files(folder, state, sections))
    }

    /// Makes the folder ready for a new checkpoint, and returns the checkpoint's name.
    pub(super) fn new_name(&self, step: u64) -> Result<Name, CheckpointError> {
        let dir = &self.dir;
        if self.role == Role::Reader {
            return Err(CheckpointError::ReadOnly { dir: dir.clone() });
        }
        folder::create_folder(dir).map_err(CheckpointError::write(dir))?;
        rotate::sweep(dir, |text| self.warn(text));
        // These were found damaged while the folder was only read.
        self.mark_damaged();
        self.free_name(step)
    }

    /// The folder of a checkpoint that is not complete.
    pub(super) fn beside(&self, name: Name) -> PathBuf {
        self.dir.join(format!("{UNFINISHED}{name}"))
    }

    /// Makes a complete checkpoint the latest, and deletes old ones.
    pub(super) fn publish(&self, name: Name, mark: Mark) -> Result<Saved, CheckpointError> {
        self.announce(name, mark)?;
        let deleted = self.rotate(name);
        let path = self.dir.join(name.to_string());
        Ok(Saved { path, deleted: deleted.iter().map(Name::to_string).collect() })
    }

    /// An unused name: a run that went back to an older checkpoint reaches a step for the second time.
    fn free_name(&self, step: u64) -> Result<Name, CheckpointError> {
        let taken = folder::checkpoints(&self.dir).map_err(CheckpointError::write(&self.dir))?;
        let turns = taken.iter().filter(|name| name.step == step).map(|name| name.turn);
        Ok(Name { step, turn: turns.max().unwrap_or(0) + 1 })
    }

    pub(super) fn place(&self, beside: &Path, name: Name) -> Result<(), CheckpointError> {
        let path = self.dir.join(name.to_string());
        let placed = std::fs::rename(beside, &path).and_then(|()| folder::sync_folder(&self.dir));
        placed.map_err(CheckpointError::write(&path))
    }

    /// Moves the links. If `latest` cannot be moved, the new checkpoint is deleted, because the caller gets an error.
    fn announce(&self, name: Name, mark: Mark) -> Result<(), CheckpointError> {
        let dir = &self.dir;
        if let Err(error) = folder::point(dir, LATEST, name) {
            if folder::linked(dir, LATEST) != Some(name) {
                let _ = rotate::delete(dir, name);
            }
            return Err(CheckpointError::write(&dir.join(LATEST))(error));
        }
        mark.place().map_or(Ok(()), |place| self.announce_best(name, place))
    }

    /// Puts a checkpoint at its place among the best. The links after it move first, so that an interruption loses none
    /// but the last.
    fn announce_best(&self, name: Name, place: NonZeroUsize) -> Result<(), CheckpointError> {
        let point = |link: &str, name| {
            folder::point(&self.dir, link, name).map_err(CheckpointError::write(&self.dir.join(link)))
        };
        for behind in (place.get()..self.keep_best.get()).rev() {
            if let Some(moved) = folder::linked(&self.dir, &folder::best(behind)) {
                point(&folder::best(behind + 1), moved)?;
            }
        }
        if place > self.keep_best {
            return Ok(());
        }
        point(&folder::best(place.get()), name)
    }
}

/// A copy of the state for another thread. It waits for the GPUs first, because that thread would not.
pub(super) fn settled(state: &RunState) -> RunState {
    let tensors = state.model.iter().chain(&state.trained).chain(&state.optimizer.tensors);
    let tensors = tensors.filter(|named| named.tensor.defined());
    let gpus: BTreeSet<_> = tensors
        .filter_map(|named| match named.tensor.device() {
            Device::Cuda(gpu) => Some(gpu as i64),
            _ => None,
        })
        .collect();
    gpus.into_iter().for_each(tch::Cuda::synchronize);
    state.clone()
}

/// The mesh of so many ranks.
pub(super) fn mesh_of(state: &RunState, num_ranks: usize) -> Result<MeshShape, CheckpointError> {
    let mesh = state.mesh.unwrap_or(MeshShape::default().with(Axis::Dp, num_ranks));
    mesh.check(num_ranks)?;
    Ok(mesh)
}

/// Writes all files of a checkpoint to a new folder, and syncs them to disk.
fn write_files(
    folder: &Path,
    state: &RunState,
    generators: &[RngState],
    mark: Mark,
) -> Result<(), CheckpointError> {
    let mesh = mesh_of(state, generators.len())?;
    std::fs::create_dir(folder).map_err(CheckpointError::write(folder))?;
    let mut shards = vec![
        write_section(folder, Section::Model, &state.model)?,
        write_section(folder, Section::Optimizer, &state.optimizer.tensors)?,
        write_section(folder, Section::Rng, &rng::to_tensors(generators)?)?,
    ];
    if !state.trained.is_empty() {
        let in_file = |named: &Named| Named { name: with_suffix(&named.name), ..named.clone() };
        let trained: Vec<_> = state.trained.iter().map(in_file).collect();
        shards.push(write_section(folder, Section::Trained, &trained)?);
    }
    Manifest::new(state, mark, mesh, shards)?.write(folder)?;
    folder::sync_folder(folder).map_err(CheckpointError::write(folder))
}

/// Writes all files of an imported checkpoint.
fn import_files(folder: &Path, state: &RunState, sections: Vec<Import<'_>>) -> Result<(), CheckpointError> {
    std::fs::create_dir(folder).map_err(CheckpointError::write(folder))?;
    let mut shards =
        vec![write_section(folder, Section::Rng, &rng::to_tensors(std::slice::from_ref(&state.rng))?)?];
    for Import { section, made } in sections {
        let path = folder.join(section.file());
        let written = write_made(&path, made).map_err(CheckpointError::of_file(&path))?;
        shards.push(Shard::of(section, &section.file(), &written, |entry| &entry.shape)?);
    }
    let model = safetensors::map(&folder.join(Section::Model.file()))?;
    let model = model.into_iter().map(|(name, tensor)| Named { name, tensor }).collect();
    let is_finite = RunState { model, ..state.clone() }.is_finite();
    let mesh = mesh_of(state, 1)?;
    Manifest::of_shards(state, Mark::Latest, mesh, shards, is_finite)?.write(folder)?;
    folder::sync_folder(folder).map_err(CheckpointError::write(folder))
}

/// Writes all tensors of a section to one file.
pub(super) fn write_section(
    folder: &Path,
    section: Section,
    tensors: &[Named],
) -> Result<Shard, CheckpointError> {
    let mut writer = ShardWriter::new(section);
    tensors.iter().try_for_each(|named| writer.add(TensorPart::whole(named)))?;
    writer.write(folder, &section.file())
}
