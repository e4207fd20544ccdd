//! Saving: beside first, then in place, then known as the latest.
//!
//! ```text
//!   DIR/.tmp-step-00000120/*   each file written and fsynced, then the folder
//!   DIR/step-00000120          renamed, DIR fsynced
//!   DIR/latest, DIR/best…      moved, DIR fsynced
//!   DIR/step-00000040          gone
//! ```
//! Wherever that ends, the checkpoint before is whole and `latest` names a whole one.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use drumline_comm::ProcessGroup;
use drumline_torch::RngState;
use serde::{Deserialize, Serialize};
use tch::Device;

use super::error::CheckpointError;
use super::folder::{self, LATEST, Name, UNFINISHED};
use super::load::{MODEL, OPTIMIZER, RNG, TRAINED};
use super::manifest::Manifest;
use super::on_rank_zero::on_rank_zero;
use super::state::{Mark, TrainState};
use super::{Checkpoints, Role};
use super::{rng, rotate, tensor_file};

/// A checkpoint that is safe on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Saved {
    /// Its folder, as rank 0 sees it.
    pub path: PathBuf,
    /// The checkpoints that were deleted for it.
    pub deleted: Vec<String>,
}

/// What each rank contributes: its generators, and what must be the same on all.
#[derive(Serialize, Deserialize)]
struct Part {
    agreed: Vec<(String, String)>,
    cpu: Vec<u8>,
    cuda: Vec<Vec<u8>>,
}

impl Part {
    fn of(state: &TrainState) -> Self {
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

/// An error that lists what is not the same on all ranks.
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
    /// An error is on all ranks; the checkpoints before are as they were, and the group can still be used.
    #[track_caller]
    pub fn save(
        &self,
        state: &TrainState,
        mark: Mark,
        group: &ProcessGroup,
    ) -> Result<Saved, CheckpointError> {
        let parts = group.gather_object(&Part::of(state), 0)?.unwrap_or_default();
        let state = settled(state);
        let saved = on_rank_zero(group, move || {
            check_agreement(&parts)?;
            let generators = parts.into_iter().map(|part| RngState { cpu: part.cpu, cuda: part.cuda });
            self.write(&state, &generators.collect::<Vec<_>>(), mark)
        })?;
        Ok(group.broadcast_object(saved.as_ref(), 0)?)
    }

    /// Rank 0's part.
    fn write(
        &self,
        state: &TrainState,
        generators: &[RngState],
        mark: Mark,
    ) -> Result<Saved, CheckpointError> {
        let dir = &self.dir;
        if self.role == Role::Reader {
            return Err(CheckpointError::ReadOnly { dir: dir.clone() });
        }
        folder::create_folder(dir).map_err(CheckpointError::write(dir))?;
        rotate::sweep(dir, |text| self.warn(text));
        // What was found damaged while this was read-only.
        self.mark_damaged();
        let name = self.free_name(state.step)?;
        let beside = dir.join(format!("{UNFINISHED}{name}"));
        let placed = write_files(&beside, state, generators, mark).and_then(|()| self.place(&beside, name));
        if let Err(error) = placed {
            // On a full disk the room is needed; what cannot be removed now is swept by the next save.
            let _ = std::fs::remove_dir_all(&beside);
            return Err(error);
        }
        self.announce(name, mark)?;
        let deleted = self.rotate(name);
        Ok(Saved { path: dir.join(name.to_string()), deleted: deleted.iter().map(Name::to_string).collect() })
    }

    /// A name that no checkpoint has: a run that went back comes to a step for the second time.
    fn free_name(&self, step: u64) -> Result<Name, CheckpointError> {
        let taken = folder::checkpoints(&self.dir).map_err(CheckpointError::write(&self.dir))?;
        let turns = taken.iter().filter(|name| name.step == step).map(|name| name.turn);
        Ok(Name { step, turn: turns.max().unwrap_or(0) + 1 })
    }

    fn place(&self, beside: &Path, name: Name) -> Result<(), CheckpointError> {
        let path = self.dir.join(name.to_string());
        let placed = std::fs::rename(beside, &path).and_then(|()| folder::sync_folder(&self.dir));
        placed.map_err(CheckpointError::write(&path))
    }

    /// Moves the links. If `latest` cannot be moved, the new checkpoint goes again: the caller is told that there is none.
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

    /// Puts a checkpoint at its place among the best. Those behind it move first, so that wherever this ends none but the last is lost.
    fn announce_best(&self, name: Name, place: NonZeroUsize) -> Result<(), CheckpointError> {
        let point = |link: &str, name| {
            folder::point(&self.dir, link, name).map_err(CheckpointError::write(&self.dir.join(link)))
        };
        for behind in (place.get()..self.keep_best.get()).rev() {
            if let Some(moved) = folder::linked(&self.dir, &folder::best(behind)) {
                point(&folder::best(behind + 1), moved)?;
            }
        }
        match place <= self.keep_best {
            true => point(&folder::best(place.get()), name),
            false => Ok(()),
        }
    }
}

/// The state for another thread: what GPUs are still computing is done, as that thread would not wait for it.
fn settled(state: &TrainState) -> TrainState {
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

/// All files of a checkpoint in a new folder, safe on disk when this returns.
fn write_files(
    folder: &Path,
    state: &TrainState,
    generators: &[RngState],
    mark: Mark,
) -> Result<(), CheckpointError> {
    std::fs::create_dir(folder).map_err(CheckpointError::write(folder))?;
    let tensors =
        [(MODEL, &state.model), (OPTIMIZER, &state.optimizer.tensors), (RNG, &rng::to_tensors(generators)?)];
    let mut files = BTreeMap::new();
    let trained = (!state.trained.is_empty()).then_some((TRAINED, &state.trained));
    for (name, tensors) in tensors.into_iter().chain(trained) {
        files.insert(name.to_owned(), tensor_file::write(&folder.join(name), tensors)?);
    }
    Manifest::new(state, mark, generators.len(), files).write(folder)?;
    folder::sync_folder(folder).map_err(CheckpointError::write(folder))
}
