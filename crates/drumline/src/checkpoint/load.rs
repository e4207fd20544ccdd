//! Loading: rank 0 finds an undamaged checkpoint, reads it, and sends it to all ranks.
//!
//! `latest` is tried first, then the checkpoints before it, newest first. Those after it, from a run that went further,
//! come last. The length and checksum of each file must match the manifest, and the manifest its own checksum. A
//! checkpoint whose bytes are missing or wrong is refused with the reason, and the next one is the fallback. If all are
//! refused, that is an error and not a new run. A checkpoint that cannot be read for another reason may be undamaged:
//! that is an error, too, without a fallback.
//!
//! Not here: ranks that divide the state among them, and read only their own parts (`find`, `unread`).

use std::cmp::{Ordering, Reverse};
use std::path::{Path, PathBuf};

use drumline_comm::{MeshShape, ProcessGroup};
use drumline_torch::{Named, OptimizerState, RngState};
use serde::{Deserialize, Serialize};

use super::broadcast::broadcast;
use super::error::{CheckpointError, Refusal};
use super::folder::{self, BAD, BEST, LATEST, Name};
use super::manifest::{Manifest, OptimizerEntry};
use super::on_rank_zero::on_rank_zero;
use super::repair::{BestEntry, BestSaved};
use super::rng::{self, Origin};
use super::scalar::to_values;
use super::section::{Section, without_suffix};
use super::state::RunState;
use super::unread::Unread;
use super::whole_files;
use super::{Checkpoints, Role};

/// How often a reader starts again when the run has deleted what it was reading.
pub(super) const ATTEMPTS: usize = 5;

/// A checkpoint that was loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// Its folder, as rank 0 sees it.
    pub path: PathBuf,
    /// The saved state. Its tensors are new ones, in host memory; [`restore`](super::restore()) copies them into a
    /// model.
    pub state: RunState,
    /// How many ranks saved it.
    pub world_size: usize,
    /// The mesh of these ranks. The loaded state does not contain it: the ranks that save next may be others.
    pub mesh: MeshShape,
    /// Whether this rank did not exist then: its generators were seeded from rank 0's and its number.
    pub has_new_rng: bool,
    /// Newer checkpoints that were refused.
    pub refused: Vec<Refused>,
    /// If best checkpoints were lost, by damage or otherwise: the best ones that are left. Only the owner of the folder
    /// looks for them.
    pub best_left: Option<Vec<BestSaved>>,
    /// The tensors, if they have not been read ([`read_parts`](Self::read_parts)): `state` does not have them then.
    pub(super) unread: Option<Unread>,
    pub(super) num_bytes_read: u64,
}

impl Loaded {
    /// A checkpoint without the tensors of model and optimizer. `rng` are the generators of all ranks.
    pub(super) fn new(
        path: PathBuf,
        manifest: Manifest,
        head: Head,
        rng: &[Named],
        rank: usize,
    ) -> Result<Self, CheckpointError> {
        let mesh = manifest.mesh().expect("rank 0 has read it");
        let (rng, origin) = rng::for_rank(rng, rank)?;
        Ok(Self {
            path,
            world_size: mesh.num_ranks(),
            mesh,
            has_new_rng: origin == Origin::Derived,
            refused: head.refused,
            best_left: head.best_left.map(|left| left.into_iter().map(Into::into).collect()),
            unread: None,
            num_bytes_read: 0,
            state: state_of(manifest, rng),
        })
    }

    /// How many bytes of tensors this rank has read from files in [`read_parts`](Self::read_parts).
    pub fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read
    }

    /// The metric of the best checkpoint that exists.
    pub fn best_metric(&self) -> Option<f64> {
        match &self.best_left {
            Some(left) => left.first()?.score.map(|score| score.value),
            None => self.state.best,
        }
    }

    /// A warning for a run that resumes with another number of ranks. A program that only loads weights does not need
    /// it.
    pub(crate) fn rank_change_warning(&self, group: &ProcessGroup) -> Option<String> {
        let (saved, here) = (self.world_size, group.size());
        let generators = match saved.cmp(&here) {
            Ordering::Equal => return None,
            Ordering::Less => format!("{} new random numbers", ranks(saved, here, "gets", "get")),
            Ordering::Greater => {
                format!("the random numbers of {} dropped", ranks(here, saved, "are", "are"))
            }
        };
        let path = self.path.display();
        Some(format!("{path} was saved by {saved} ranks and is loaded by {here}: {generators}"))
    }
}

/// A range of ranks with a verb.
fn ranks(first: usize, end: usize, one: &str, several: &str) -> String {
    match end - first {
        1 => format!("rank {first} {one}"),
        _ => format!("ranks {first} to {} {several}", end - 1),
    }
}

/// A checkpoint that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{path} cannot be used: {reason}")]
pub struct Refused {
    /// Its folder.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// A checkpoint that was read and checked, in rank 0's memory.
struct Found {
    path: String,
    head: Head,
    manifest: Manifest,
    /// The tensors of each section.
    tensors: [Vec<Named>; Section::ALL.len()],
}

/// The first undamaged checkpoint of several.
pub(super) struct First<T> {
    pub(super) name: Name,
    pub(super) read: T,
    /// The refused ones before it.
    pub(super) refused: Vec<Refused>,
}

/// What rank 0 has found out about the other checkpoints of a folder.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) refused: Vec<Refused>,
    pub(super) best_left: Option<Vec<BestEntry>>,
}

/// What rank 0 sends to the others, besides the tensors.
#[derive(Serialize, Deserialize)]
struct Sent {
    path: String,
    /// As JSON text, which keeps the bits of every number.
    manifest: String,
    head: Head,
}

impl Checkpoints {
    /// Loads the latest undamaged checkpoint on all ranks, which call this together. Returns `None` if there is no
    /// checkpoint at all.
    ///
    /// Any number of ranks may load what any number has saved. Rank 0 warns of damaged checkpoints and, unless this is
    /// [`read_only`](Self::read_only), renames them to `bad-…` and makes `latest` and `best` point to undamaged ones.
    #[track_caller]
    pub fn load_latest(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let found = on_rank_zero(group, || self.find())?;
        share(found, group)
    }

    /// Loads the best checkpoint, or returns `None` if none is marked as the best. There is no fallback: if it is
    /// damaged, that is an error.
    #[track_caller]
    pub fn load_best(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let found = on_rank_zero(group, || {
            let best = folder::linked(&self.dir, BEST).map(|name| self.dir.join(name.to_string()));
            best.map(|path| read(&path).map_err(|reason| unusable(path, reason))).transpose()
        })?;
        share(found, group)
    }

    fn find(&self) -> Result<Option<Found>, CheckpointError> {
        let mut names = self.candidates()?;
        for _ in 0..ATTEMPTS {
            let found = self.first_whole(&names);
            let refused = match &found {
                Ok(Some(found)) => &found.head.refused,
                Err(CheckpointError::NoneUsable { refused, .. }) => refused,
                _ => return found,
            };
            let before = std::mem::replace(&mut names, self.candidates()?);
            if refused.is_empty() || self.role == Role::Owner || before == names {
                return found;
            }
            // The run that owns the folder may have deleted what was being read, and saved others since.
            self.damaged().clear();
        }
        self.first_whole(&names)
    }

    /// Reads the first undamaged one of these. The owner renames the damaged ones before it.
    fn first_whole(&self, names: &[Name]) -> Result<Option<Found>, CheckpointError> {
        let Some(First { name, read: mut found, refused }) = self.first(names, read)? else {
            return Ok(None);
        };
        if self.role == Role::Owner {
            found.head.best_left = self.repair(name, &found.manifest)?;
        }
        if !found.manifest.is_finite {
            self.warn_of_nan(name);
        }
        found.head.refused = refused;
        Ok(Some(found))
    }

    /// The first one of these that `read` accepts. Rank 0 warns of the damaged ones before it.
    pub(super) fn first<T>(
        &self,
        names: &[Name],
        read: impl Fn(&Path) -> Result<T, Refusal>,
    ) -> Result<Option<First<T>>, CheckpointError> {
        let mut refused = Vec::new();
        for &name in names {
            let path = self.dir.join(name.to_string());
            match read(&path) {
                Ok(read) => return Ok(Some(First { name, read, refused })),
                Err(reason) if reason.is_damage() => {
                    self.refuse(name, &reason);
                    refused.push(Refused { path: path.display().to_string(), reason: reason.to_string() });
                }
                Err(reason) => return Err(CheckpointError::Unreadable { path, reason }),
            }
        }
        refused.extend(self.refused_before()?);
        if refused.is_empty() {
            return Ok(None);
        }
        Err(CheckpointError::NoneUsable { dir: self.dir.clone(), refused })
    }

    pub(super) fn warn_of_nan(&self, name: Name) {
        let names = folder::checkpoints(&self.dir).unwrap_or_default();
        let before = match self.last_finite(&names, name, &self.damaged().clone()) {
            Some(finite) => format!("; try {finite}, the last with finite ones: rename the newer folders"),
            None => String::new(),
        };
        let path = self.dir.join(name.to_string());
        self.warn(&format!(
            "{} was saved with a loss or weights that are NaN or infinite{before}",
            path.display()
        ));
    }

    /// The checkpoints that an earlier run has found damaged.
    fn refused_before(&self) -> Result<Vec<Refused>, CheckpointError> {
        let search = |source| CheckpointError::Search { path: self.dir.clone(), source };
        let names = folder::entries(&self.dir).map_err(search)?;
        let mut bad: Vec<_> = names.iter().filter(|name| name.starts_with(&format!("{BAD}step-"))).collect();
        bad.sort();
        let refused = |name: &String| Refused {
            path: self.dir.join(name).display().to_string(),
            reason: "it was found damaged before".to_owned(),
        };
        Ok(bad.into_iter().map(refused).collect())
    }

    /// Whether there is no checkpoint at all, not even a damaged one. Needs no group.
    pub fn is_empty(&self) -> Result<bool, CheckpointError> {
        Ok(self.candidates()?.is_empty() && self.refused_before()?.is_empty())
    }

    /// All checkpoints, in the order in which they are tried.
    pub(super) fn candidates(&self) -> Result<Vec<Name>, CheckpointError> {
        let search = |source| CheckpointError::Search { path: self.dir.clone(), source };
        let names = folder::checkpoints(&self.dir).map_err(search)?;
        Ok(load_order(names, folder::linked(&self.dir, LATEST)))
    }
}

/// The latest, those before it, then those after it; each newest first. Without a link the newest is the latest.
fn load_order(mut names: Vec<Name>, latest: Option<Name>) -> Vec<Name> {
    // A link to a missing folder is tried as well, so that the error gives the reason.
    names.extend(latest.filter(|latest| !names.contains(latest)));
    names.sort_by_key(|name| (latest.is_some_and(|latest| *name > latest), Reverse(*name)));
    names
}

/// The error for a checkpoint that was requested by name, without a fallback.
pub(super) fn unusable(path: PathBuf, reason: Refusal) -> CheckpointError {
    if reason.is_damage() {
        return Refused { path: path.display().to_string(), reason: reason.to_string() }.into();
    }
    CheckpointError::Unreadable { path, reason }
}

/// Checks one checkpoint, and keeps nothing of it in memory.
pub(super) fn check(path: &Path) -> Result<(), Refusal> {
    let manifest = Manifest::read(path)?;
    manifest.files.iter().try_for_each(|(name, entry)| whole_files::check(path, name, entry))
}

/// Reads and checks one checkpoint.
fn read(path: &Path) -> Result<Found, Refusal> {
    let manifest = Manifest::read(path)?;
    let mut tensors = Section::ALL.map(|_| Vec::new());
    for (section, tensors) in Section::ALL.into_iter().zip(&mut tensors) {
        let index = manifest.index(path, section)?;
        *tensors = whole_files::read(path, &manifest.files_of(section), &index)?;
    }
    let (path, manifest) = (path.display().to_string(), manifest.without_tensors());
    Ok(Found { path, head: Head::default(), manifest, tensors })
}

/// Sends what rank 0 has found to all ranks.
#[track_caller]
fn share(found: Option<Option<Found>>, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
    let (sent, tensors) = match found.flatten() {
        Some(Found { path, head, manifest, tensors }) => {
            let manifest = serde_json::to_string(&manifest).expect("a manifest that was read can be written");
            (Some(Sent { path, manifest, head }), tensors.map(Some))
        }
        None => (None, Section::ALL.map(|_| None)),
    };
    let is_root = group.rank() == 0;
    let Some(sent) = group.broadcast_object(is_root.then_some(&sent), 0)? else { return Ok(None) };
    let [model, trained, optimizer, rng] = tensors.map(|tensors| broadcast(tensors, group));
    let manifest = serde_json::from_str(&sent.manifest).expect("rank 0 has read and written it");
    let mut loaded = Loaded::new(sent.path.into(), manifest, sent.head, &rng?, group.rank())?;
    loaded.state.model = model?;
    loaded.state.trained = without_suffix(trained?);
    loaded.state.optimizer.tensors = optimizer?;
    Ok(Some(loaded))
}

/// The state without the tensors of model and optimizer.
fn state_of(manifest: Manifest, rng: RngState) -> RunState {
    let OptimizerEntry { kind, scalars, .. } = manifest.optimizer;
    RunState {
        model: Vec::new(),
        trained: Vec::new(),
        optimizer: OptimizerState { kind, scalars: to_values(scalars), tensors: Vec::new() },
        layout: None,
        mesh: None,
        epoch: manifest.epoch,
        step: manifest.step,
        sampler: manifest.sampler,
        schedule: manifest.schedule,
        scaler: manifest.scaler,
        trainer: manifest.trainer,
        accelerator: manifest.accelerator,
        best: manifest.best.map(|best| best.0),
        score: manifest.score.map(Into::into),
        loss: manifest.loss.map(|loss| loss.0),
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
            let names = load_order([10, 20, 30, 40].map(name).to_vec(), latest.map(name));
            names.iter().map(|name| name.step).collect::<Vec<_>>()
        };
        assert_eq!(steps(None), [40, 30, 20, 10]);
        assert_eq!(steps(Some(40)), [40, 30, 20, 10]);
        assert_eq!(steps(Some(20)), [20, 10, 40, 30]);
        assert_eq!(steps(Some(25)), [25, 20, 10, 40, 30]);
    }
}
