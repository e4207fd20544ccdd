//! Saving a state that ranks divide among them: each rank writes its own parts, all at once.
//!
//! ```text
//!   rank 0      checks, makes DIR/.tmp-step-00000120 ─┐                                 ┌─▶ manifest, rename, links
//!   all ranks                                         └─▶ shard-00001-model-… , fsync ─▶┘   or an error on all ranks
//! ```
//! Nothing is gathered but the descriptions of the files. All ranks must see the folder: rank 0 checks that the files
//! of all ranks are in it.

use std::collections::BTreeMap;
use std::path::Path;

use drumline_comm::ProcessGroup;
use drumline_torch::RngState;
use serde::{Deserialize, Serialize};

use super::Checkpoints;
use super::error::CheckpointError;
use super::folder::{self, Name};
use super::layout::StateLayout;
use super::manifest::Manifest;
use super::on_rank_zero::on_rank_zero;
use super::rng;
use super::save::{Saved, mesh_of, settled, write_section};
use super::section::{Section, with_suffix};
use super::shard_writer::{Shard, ShardWriter, TensorPart};
use super::state::{Mark, RunState};
use crate::launch::main_first::run_on_all;

/// What a rank has written.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    shards: Vec<Shard>,
    /// Whether its weights and its loss are finite.
    is_finite: bool,
}

/// What rank 0 needs to complete a checkpoint, besides the files.
pub(super) struct Draft<'a> {
    pub(super) state: &'a RunState,
    pub(super) layout: &'a StateLayout,
    /// The generators of all ranks, on rank 0.
    pub(super) generators: Vec<RngState>,
    pub(super) mark: Mark,
}

impl Checkpoints {
    /// Saves the parts of all ranks. An error is returned on all ranks, and the unfinished folder is removed.
    pub(super) fn save_shards(
        &self,
        draft: &Draft<'_>,
        checked: Result<(), CheckpointError>,
        group: &ProcessGroup,
    ) -> Result<Saved, CheckpointError> {
        let name = on_rank_zero(group, || {
            checked?;
            mesh_of(draft.state, draft.generators.len())?;
            let name = self.new_name(draft.state.step)?;
            let beside = self.beside(name);
            std::fs::create_dir(&beside).map_err(CheckpointError::write(&beside))?;
            Ok((name.step, name.turn))
        })?;
        let (step, turn) = group.broadcast_object(name.as_ref(), 0)?;
        let name = Name { step, turn };
        let state = settled(draft.state);
        let generators = (group.rank() == 0).then_some(&draft.generators[..]);
        let write = || write_parts(&self.beside(name), &state, draft.layout, group.rank(), generators);
        let written = run_on_all(group, "a checkpoint", write)?;
        let all = match agree(group, written) {
            Ok(written) => group.gather_object(&written, 0)?,
            Err(error) => {
                on_rank_zero(group, || {
                    self.drop_unfinished(name);
                    Ok(())
                })?;
                return Err(error);
            }
        };
        let saved = on_rank_zero(group, || self.complete(name, draft, all.unwrap_or_default()))?;
        Ok(group.broadcast_object(saved.as_ref(), 0)?)
    }

    fn drop_unfinished(&self, name: Name) {
        // What cannot be removed now is removed by the next save.
        let _ = std::fs::remove_dir_all(self.beside(name));
    }

    /// Rank 0's part when all files are written.
    fn complete(
        &self,
        name: Name,
        draft: &Draft<'_>,
        written: Vec<Written>,
    ) -> Result<Saved, CheckpointError> {
        let folder = self.beside(name);
        let placed = finish_files(&folder, draft, written).and_then(|()| self.place(&folder, name));
        if placed.is_err() {
            self.drop_unfinished(name);
        }
        placed?;
        self.publish(name, draft.mark)
    }
}

/// Writes the manifest of files that all ranks have written.
fn finish_files(folder: &Path, draft: &Draft<'_>, written: Vec<Written>) -> Result<(), CheckpointError> {
    let is_finite = written.iter().all(|written| written.is_finite);
    let mut shards = Vec::new();
    for (rank, written) in written.into_iter().enumerate() {
        for shard in &written.shards {
            check_seen(folder, shard, rank)?;
        }
        shards.extend(written.shards);
    }
    let mesh = mesh_of(draft.state, draft.generators.len())?;
    Manifest::of_shards(draft.state, draft.mark, mesh, shards, is_finite)?.write(folder)?;
    folder::sync_folder(folder).map_err(CheckpointError::write(folder))
}

/// Returns an error unless rank 0 sees the file of another rank.
fn check_seen(folder: &Path, shard: &Shard, rank: usize) -> Result<(), CheckpointError> {
    let path = folder.join(&shard.file);
    match std::fs::metadata(&path) {
        Ok(found) if found.len() == shard.entry.bytes => Ok(()),
        _ => Err(CheckpointError::NotShared { path, rank }),
    }
}

/// Writes this rank's files, and those of the generators on rank 0.
fn write_parts(
    folder: &Path,
    state: &RunState,
    layout: &StateLayout,
    rank: usize,
    generators: Option<&[RngState]>,
) -> Result<Written, CheckpointError> {
    if !folder.is_dir() {
        return Err(CheckpointError::NotShared { path: folder.to_owned(), rank });
    }
    let trained = layout.saved_of_model(&state.trained)?;
    let in_file = |part: TensorPart| TensorPart { name: with_suffix(&part.name), ..part };
    let sections = [
        (Section::Model, layout.saved_of_model(&state.model)?),
        (Section::Optimizer, layout.saved_of_optimizer(&state.optimizer.tensors)?),
        (Section::Trained, trained.into_iter().map(in_file).collect()),
    ];
    let mut shards = Vec::new();
    for (section, parts) in sections {
        shards.extend(write_shard(folder, section, parts, rank)?);
    }
    if let Some(generators) = generators {
        shards.push(write_section(folder, Section::Rng, &rng::to_tensors(generators)?)?);
    }
    folder::sync_folder(folder).map_err(CheckpointError::write(folder))?;
    Ok(Written { shards, is_finite: state.is_finite() })
}

/// Writes as many files as a tensor has parts, because a file has one of each; none if there is nothing to write.
fn write_shard(
    folder: &Path,
    section: Section,
    parts: Vec<TensorPart>,
    rank: usize,
) -> Result<Vec<Shard>, CheckpointError> {
    let (mut writers, mut seen) = (Vec::new(), BTreeMap::new());
    for part in parts {
        let nth: &mut usize = seen.entry(part.name.clone()).or_default();
        if *nth == writers.len() {
            writers.push(ShardWriter::new(section));
        }
        writers[*nth].add(part)?;
        *nth += 1;
    }
    let count = writers.len();
    let write =
        |(nth, writer): (usize, &ShardWriter)| writer.write(folder, &section.shard_file_of(rank, nth, count));
    writers.iter().enumerate().map(write).collect()
}

/// The same error on all ranks, if a rank has failed.
pub(super) fn agree<T>(
    group: &ProcessGroup,
    outcome: Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let causes = group.all_gather_object(&outcome.as_ref().err().map(ToString::to_string))?;
    let first = causes.into_iter().enumerate().find_map(|(rank, cause)| Some((rank, cause?)));
    match first {
        Some((rank, cause)) if outcome.is_ok() => Err(CheckpointError::OnRank { rank, cause }),
        _ => outcome,
    }
}
