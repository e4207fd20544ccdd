//! Loading: rank 0 finds a checkpoint that is whole, reads it, and gives it to all ranks.
//!
//! `latest` is tried first, then those before it, newest first; those after it, of a run that went further, come last. Each file's length and checksum must be what the manifest says, and the
//! manifest's checksum its own. One that fails is refused with the reason, which is told; if all fail, that is an error, and not a
//! fresh start.

use std::cmp::{Ordering, Reverse};
use std::path::{Path, PathBuf};

use drumline_comm::ProcessGroup;
use drumline_torch::{Named, OptimizerState, RngState};
use serde::{Deserialize, Serialize};

use super::Checkpoints;
use super::broadcast::broadcast;
use super::error::{CheckpointError, Refusal};
use super::folder::{self, BEST, LATEST, Name};
use super::manifest::{FileEntry, Manifest, OptimizerEntry};
use super::on_rank_zero::on_rank_zero;
use super::rng::{self, Origin};
use super::scalar::to_values;
use super::state::TrainState;
use super::tensor_file;

/// The weights.
pub(super) const MODEL: &str = "model.safetensors";

/// The weights that are trained on, where those of the model are others.
pub(super) const TRAINED: &str = "trained.safetensors";

/// The optimizer's tensors.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// The random number generators.
pub(super) const RNG: &str = "rng.safetensors";

/// A checkpoint that was loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// Its folder, as rank 0 sees it.
    pub path: PathBuf,
    /// What was saved. Its tensors are new ones, in the CPU's memory; [`restore`](super::restore()) copies them into a model.
    pub state: TrainState,
    /// How many ranks had saved it.
    pub world_size: usize,
    /// This rank was not there then: its generators were seeded from rank 0's and its number.
    pub has_new_rng: bool,
    /// Newer checkpoints that could not be used.
    pub refused: Vec<Refused>,
}

impl Loaded {
    /// Rank 0's word for whoever goes on with other ranks. One who wants only the weights needs none.
    pub(crate) fn warn_of_new_ranks(&self, group: &ProcessGroup) {
        let (saved, here) = (self.world_size, group.size());
        let generators = match saved.cmp(&here) {
            Ordering::Equal => return,
            Ordering::Less => format!("{} new random numbers", ranks(saved, here, "gets", "get")),
            Ordering::Greater => {
                format!("the random numbers of {} dropped", ranks(here, saved, "are", "are"))
            }
        };
        if group.rank() == 0 {
            let path = self.path.display();
            tracing::warn!("{path} was saved by {saved} ranks and is loaded by {here}: {generators}");
        }
    }
}

/// Some ranks with their verb.
fn ranks(first: usize, end: usize, one: &str, several: &str) -> String {
    match end - first {
        1 => format!("rank {first} {one}"),
        _ => format!("ranks {first} to {} {several}", end - 1),
    }
}

/// A checkpoint that could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{path} cannot be used: {reason}")]
pub struct Refused {
    /// Its folder.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// A whole checkpoint, in rank 0's memory.
struct Found {
    head: Head,
    model: Vec<Named>,
    trained: Vec<Named>,
    optimizer: Vec<Named>,
    rng: Vec<Named>,
}

/// All but the tensors.
#[derive(Serialize, Deserialize)]
struct Head {
    path: String,
    /// As text, which keeps every number's bits.
    manifest: String,
    refused: Vec<Refused>,
}

impl Checkpoints {
    /// The latest checkpoint that is whole, on all ranks, which call this together; `None` if there is none at all.
    ///
    /// Any number of ranks may load what any number has saved. Rank 0 warns of those that had to be refused.
    #[track_caller]
    pub fn load_latest(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let found = on_rank_zero(group, || self.find())?;
        share(found, group)
    }

    /// The best checkpoint; `None` if none was marked so. No other takes its place: if it is damaged, that is an error.
    #[track_caller]
    pub fn load_best(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let found = on_rank_zero(group, || {
            let best = folder::linked(&self.dir, BEST).map(|name| self.dir.join(name.to_string()));
            best.map(|path| read(&path).map_err(CheckpointError::Unusable)).transpose()
        })?;
        share(found, group)
    }

    fn find(&self) -> Result<Option<Found>, CheckpointError> {
        let mut refused = Vec::new();
        for name in self.candidates()? {
            match read(&self.dir.join(name.to_string())) {
                Ok(mut found) => {
                    found.head.refused = refused;
                    return Ok(Some(found));
                }
                Err(reason) => {
                    tracing::warn!("{reason}; trying the one before");
                    self.damaged.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(name);
                    refused.push(reason);
                }
            }
        }
        if refused.is_empty() {
            return Ok(None);
        }
        Err(CheckpointError::NoneUsable { dir: self.dir.clone(), refused })
    }

    /// All, in the order in which they are tried.
    fn candidates(&self) -> Result<Vec<Name>, CheckpointError> {
        let search = |source| CheckpointError::Search { path: self.dir.clone(), source };
        let names = folder::checkpoints(&self.dir).map_err(search)?;
        Ok(in_turn(names, folder::linked(&self.dir, LATEST)))
    }
}

/// The latest, those before it, those after it; newest first. Without a link, the newest is the latest.
fn in_turn(mut names: Vec<Name>, latest: Option<Name>) -> Vec<Name> {
    // A link whose folder is gone is tried, too, so that the reason is told.
    names.extend(latest.filter(|latest| !names.contains(latest)));
    names.sort_by_key(|name| (latest.is_some_and(|latest| *name > latest), Reverse(*name)));
    names
}

/// Reads and checks one checkpoint.
fn read(path: &Path) -> Result<Found, Refused> {
    let shown = path.display().to_string();
    read_files(path).map_err(|reason| Refused { path: shown, reason: reason.to_string() })
}

fn read_files(path: &Path) -> Result<Found, Refusal> {
    let manifest = Manifest::read(path)?;
    let tensors = |name: &str| tensor_file::read(path, name, entry(&manifest, name)?);
    let (model, optimizer, rng) = (tensors(MODEL)?, tensors(OPTIMIZER)?, tensors(RNG)?);
    let trained = if manifest.files.contains_key(TRAINED) { tensors(TRAINED)? } else { Vec::new() };
    let manifest = serde_json::to_string(&manifest).expect("a manifest that was read can be written");
    let head = Head { path: path.display().to_string(), manifest, refused: Vec::new() };
    Ok(Found { head, model, trained, optimizer, rng })
}

fn entry<'a>(manifest: &'a Manifest, name: &str) -> Result<&'a FileEntry, Refusal> {
    let missing = || Refusal::damaged(super::manifest::MANIFEST, format!("it does not list {name}"));
    manifest.files.get(name).ok_or_else(missing)
}

/// Gives what rank 0 has found to all ranks.
#[track_caller]
fn share(found: Option<Option<Found>>, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
    let (head, tensors) = match found.flatten() {
        Some(Found { head, model, trained, optimizer, rng }) => {
            (Some(head), [model, trained, optimizer, rng].map(Some))
        }
        None => (None, [None, None, None, None]),
    };
    let is_root = group.rank() == 0;
    let Some(head) = group.broadcast_object(is_root.then_some(&head), 0)? else { return Ok(None) };
    let [model, trained, optimizer, rng] = tensors.map(|tensors| broadcast(tensors, group));
    let manifest: Manifest = serde_json::from_str(&head.manifest).expect("rank 0 has read and written it");
    let (rng, origin) = rng::for_rank(&rng?, group.rank())?;
    Ok(Some(Loaded {
        path: head.path.into(),
        world_size: manifest.world_size,
        has_new_rng: origin == Origin::Derived,
        refused: head.refused,
        state: TrainState { trained: trained?, ..state_of(manifest, (model?, optimizer?), rng) },
    }))
}

fn state_of(manifest: Manifest, (model, tensors): (Vec<Named>, Vec<Named>), rng: RngState) -> TrainState {
    let OptimizerEntry { kind, scalars } = manifest.optimizer;
    TrainState {
        model,
        trained: Vec::new(),
        optimizer: OptimizerState { kind, scalars: to_values(scalars), tensors },
        epoch: manifest.epoch,
        step: manifest.step,
        sampler: manifest.sampler,
        schedule: manifest.schedule,
        scaler: manifest.scaler,
        best: manifest.best.map(|best| best.0),
        config: manifest.config,
        rng,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_then_those_before_it_then_those_after() {
        let steps = |latest: Option<u64>| {
            let name = |step| Name { step, turn: 1 };
            let names = in_turn([10, 20, 30, 40].map(name).to_vec(), latest.map(name));
            names.iter().map(|name| name.step).collect::<Vec<_>>()
        };
        assert_eq!(steps(None), [40, 30, 20, 10]);
        assert_eq!(steps(Some(40)), [40, 30, 20, 10]);
        assert_eq!(steps(Some(20)), [20, 10, 40, 30]);
        assert_eq!(steps(Some(25)), [25, 20, 10, 40, 30]);
    }
}
