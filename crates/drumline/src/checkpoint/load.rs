//! Loading: rank 0 finds a checkpoint that is whole, reads it, and gives it to all ranks.
//!
//! `latest` is tried first, then those before it, newest first; those after it, of a run that went further, come last. Each file's length and checksum must be what the manifest says, and the
//! manifest's checksum its own. One whose bytes are missing or wrong is refused with the reason; if all are, that is an error, and not a
//! fresh start. One that cannot be read for another reason may be whole: that is an error, too, and loading does not fall back to an older one.

use std::cmp::{Ordering, Reverse};
use std::path::{Path, PathBuf};

use drumline_comm::ProcessGroup;
use drumline_torch::{Named, OptimizerState, RngState};
use serde::{Deserialize, Serialize};

use super::broadcast::broadcast;
use super::error::{CheckpointError, Refusal};
use super::folder::{self, BAD, BEST, LATEST, Name};
use super::manifest::{FileEntry, Manifest, OptimizerEntry};
use super::on_rank_zero::on_rank_zero;
use super::repair::{BestEntry, BestSaved};
use super::rng::{self, Origin};
use super::scalar::to_values;
use super::state::TrainState;
use super::tensor_file;
use super::{Checkpoints, Role};

/// The weights.
pub(super) const MODEL: &str = "model.safetensors";

/// The weights that are trained on, where those of the model are others.
pub(super) const TRAINED: &str = "trained.safetensors";

/// The optimizer's tensors.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// The random number generators.
pub(super) const RNG: &str = "rng.safetensors";

/// How often a reader begins again when the run has deleted what it was reading.
const ATTEMPTS: usize = 5;

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
    /// If best checkpoints were lost, by damage or otherwise: those that are the best now. Only the owner looks at them.
    pub best_left: Option<Vec<BestSaved>>,
}

impl Loaded {
    /// The metric of the best checkpoint that there is.
    pub fn best_metric(&self) -> Option<f64> {
        match &self.best_left {
            Some(left) => left.first()?.score.map(|score| score.value),
            None => self.state.best,
        }
    }

    /// A warning for whoever resumes with another number of ranks. One who wants only the weights needs none.
    pub(crate) fn of_new_ranks(&self, group: &ProcessGroup) -> Option<String> {
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
    manifest: Manifest,
    model: Vec<Named>,
    trained: Vec<Named>,
    optimizer: Vec<Named>,
    rng: Vec<Named>,
}

/// The first checkpoint of several that is whole.
pub(super) struct First<T> {
    pub(super) name: Name,
    pub(super) read: T,
    /// Those before it.
    refused: Vec<Refused>,
}

/// All but the tensors.
#[derive(Serialize, Deserialize)]
struct Head {
    path: String,
    /// As text, which keeps every number's bits.
    manifest: String,
    refused: Vec<Refused>,
    best_left: Option<Vec<BestEntry>>,
}

impl Checkpoints {
    /// The latest checkpoint that is whole, on all ranks, which call this together; `None` if there is none at all.
    ///
    /// Any number of ranks may load what any number has saved. Rank 0 warns of damaged ones and, unless this is
    /// [`read_only`](Self::read_only), renames them to `bad-…` and makes `latest` and `best` name whole ones.
    #[track_caller]
    pub fn load_latest(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let found = on_rank_zero(group, || self.find())?;
        share(found, group)
    }

    /// The best checkpoint; `None` if none was marked so. There is no fallback: if it is damaged, that is an error.
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

    /// The first of these that is whole. The owner renames the damaged ones before it.
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

    /// The first of these that is whole, as `read` finds. Damaged ones before it are warned of.
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

    fn warn_of_nan(&self, name: Name) {
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

    /// Those that were found damaged by an earlier run.
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

    /// Whether there is no checkpoint at all, whole or damaged, nor one that was found damaged before. Needs no group.
    pub fn is_empty(&self) -> Result<bool, CheckpointError> {
        Ok(self.candidates()?.is_empty() && self.refused_before()?.is_empty())
    }

    /// All, in the order in which they are tried.
    pub(super) fn candidates(&self) -> Result<Vec<Name>, CheckpointError> {
        let search = |source| CheckpointError::Search { path: self.dir.clone(), source };
        let names = folder::checkpoints(&self.dir).map_err(search)?;
        Ok(in_turn(names, folder::linked(&self.dir, LATEST)))
    }
}

/// The latest, those before it, those after it; newest first. Without a link, the newest is the latest.
fn in_turn(mut names: Vec<Name>, latest: Option<Name>) -> Vec<Name> {
    // A link whose folder is gone is tried, too, so that the error says why it was refused.
    names.extend(latest.filter(|latest| !names.contains(latest)));
    names.sort_by_key(|name| (latest.is_some_and(|latest| *name > latest), Reverse(*name)));
    names
}

/// The error where one checkpoint and no other was asked for.
pub(super) fn unusable(path: PathBuf, reason: Refusal) -> CheckpointError {
    match reason.is_damage() {
        true => Refused { path: path.display().to_string(), reason: reason.to_string() }.into(),
        false => CheckpointError::Unreadable { path, reason },
    }
}

/// Checks one checkpoint, and keeps nothing of it in memory.
pub(super) fn check(path: &Path) -> Result<(), Refusal> {
    let manifest = Manifest::read(path)?;
    let trained = manifest.files.contains_key(TRAINED).then_some(TRAINED);
    [MODEL, OPTIMIZER, RNG]
        .into_iter()
        .chain(trained)
        .try_for_each(|name| tensor_file::check(path, name, entry(&manifest, name)?))
}

/// Reads and checks one checkpoint.
fn read(path: &Path) -> Result<Found, Refusal> {
    let manifest = Manifest::read(path)?;
    let tensors = |name: &str| tensor_file::read(path, name, entry(&manifest, name)?);
    let (model, optimizer, rng) = (tensors(MODEL)?, tensors(OPTIMIZER)?, tensors(RNG)?);
    let trained = if manifest.files.contains_key(TRAINED) { tensors(TRAINED)? } else { Vec::new() };
    let text = serde_json::to_string(&manifest).expect("a manifest that was read can be written");
    let path = path.display().to_string();
    let head = Head { path, manifest: text, refused: Vec::new(), best_left: None };
    Ok(Found { head, manifest, model, trained, optimizer, rng })
}

fn entry<'a>(manifest: &'a Manifest, name: &str) -> Result<&'a FileEntry, Refusal> {
    let missing = || Refusal::damaged(super::manifest::MANIFEST, format!("it does not list {name}"));
    manifest.files.get(name).ok_or_else(missing)
}

/// Gives what rank 0 has found to all ranks.
#[track_caller]
fn share(found: Option<Option<Found>>, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
    let (head, tensors) = match found.flatten() {
        Some(Found { head, model, trained, optimizer, rng, .. }) => {
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
        best_left: head.best_left.map(|left| left.into_iter().map(Into::into).collect()),
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
            let names = in_turn([10, 20, 30, 40].map(name).to_vec(), latest.map(name));
            names.iter().map(|name| name.step).collect::<Vec<_>>()
        };
        assert_eq!(steps(None), [40, 30, 20, 10]);
        assert_eq!(steps(Some(40)), [40, 30, 20, 10]);
        assert_eq!(steps(Some(20)), [20, 10, 40, 30]);
        assert_eq!(steps(Some(25)), [25, 20, 10, 40, 30]);
    }
}
