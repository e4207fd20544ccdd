//! Repair by the owner of a folder, once it has an undamaged checkpoint: damaged ones are renamed to `bad-…`, and the
//! links `latest`, `best`, `best-2`, … point to undamaged checkpoints again.
//!
//! ```text
//!   before  latest ─▶ step 28 ✗    best ─▶ step 28 ✗                      step 14, step 21
//!   after   latest ─▶ step 21      best ─▶ step 14, if its score is better   bad-step 28
//! ```
//! Rotation keeps what the links point to and does not count `bad-…`. So it never deletes an undamaged checkpoint in
//! favour of a damaged one. If all are damaged, nothing is changed: the next start fails with the same reasons instead
//! of beginning a new run.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Checkpoints;
use super::error::{CheckpointError, Refusal};
use super::folder::{self, LATEST, Name, best, linked, linked_best};
use super::load::check;
use super::manifest::{Manifest, ScoreEntry};
use super::rotate::remove_best_from;
use super::state::Score;

/// One of the best checkpoints that are left.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct BestSaved {
    /// Steps done at that time.
    pub step: u64,
    /// Epochs done at that time.
    pub epoch: u64,
    /// Its metric, which older checkpoints do not have.
    pub score: Option<Score>,
}

/// As [`BestSaved`], in a form that is sent to other ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BestEntry {
    step: u64,
    epoch: u64,
    score: Option<ScoreEntry>,
}

impl From<BestEntry> for BestSaved {
    fn from(BestEntry { step, epoch, score }: BestEntry) -> Self {
        Self { step, epoch, score: score.map(Into::into) }
    }
}

impl Checkpoints {
    fn path(&self, name: Name) -> PathBuf {
        self.dir.join(name.to_string())
    }

    /// Renames the checkpoints that were found damaged.
    pub(super) fn mark_damaged(&self) {
        // One that cannot be renamed is remembered, so that rotation does not count it.
        self.damaged().retain(|name| match folder::set_aside(&self.dir, *name) {
            Ok(aside) => {
                if let Some(aside) = aside {
                    let (was, now) = (self.path(*name), aside.display().to_string());
                    self.warn(&format!("{} is damaged, and was renamed to {now}", was.display()));
                }
                false
            }
            Err(error) => {
                let path = self.path(*name);
                self.warn(&format!("{} is damaged, and cannot be renamed: {error}", path.display()));
                true
            }
        });
    }

    /// Renames damaged checkpoints, and makes all links point to undamaged ones now that `name` was read. If some of
    /// the best were lost, now or at an earlier start, returns those that are left.
    pub(super) fn repair(
        &self,
        name: Name,
        manifest: &Manifest,
    ) -> Result<Option<Vec<BestEntry>>, CheckpointError> {
        let Best { mut left, lost } = self.whole_best(name)?;
        let wanted = left.len() + lost;
        self.mark_damaged();
        self.point(LATEST, name);
        // Completes a save that was interrupted between two links.
        if let Some(place) = manifest.place.filter(|_| !left.contains(&name)) {
            left.insert(left.len().min(place.get() - 1), name);
        }
        if lost > 0 {
            left.extend(self.replacements(name, &left, wanted.saturating_sub(left.len())));
        }
        left.iter().enumerate().for_each(|(place, name)| self.point(&best(place + 1), *name));
        remove_best_from(&self.dir, left.len() + 1);
        if lost == 0 && !self.has_lost_before(name, manifest, left.first()) {
            return Ok(None);
        }
        if lost > 0 {
            self.warn_of_lost_best(&left);
        }
        let entry = |name: &Name| Manifest::read(&self.path(*name)).ok().map(|manifest| entry(&manifest));
        Ok(Some(left.iter().filter_map(entry).collect()))
    }

    /// Whether a best checkpoint was lost at an earlier start: a damaged one was put aside, and what was saved before still
    /// has its metric as the best.
    fn has_lost_before(&self, read: Name, manifest: &Manifest, first: Option<&Name>) -> bool {
        let is_older = |step: u64| step <= read.step;
        let Some(saved) = manifest.best.filter(|_| folder::bad_steps(&self.dir).into_iter().any(is_older))
        else {
            return false;
        };
        let score = first.and_then(|name| Manifest::read(&self.path(*name)).ok()?.score);
        score.is_none_or(|score| Score::from(score).value != saved.0)
    }

    /// Which of the best are undamaged; the others are remembered as damaged.
    fn whole_best(&self, read: Name) -> Result<Best, CheckpointError> {
        let mut best = Best { left: Vec::new(), lost: 0 };
        for name in linked_best(&self.dir) {
            if name == read || self.is_whole(name)? {
                best.left.push(name);
            } else {
                best.lost += 1;
            }
        }
        // A save that was interrupted while it moved links has left one of them twice.
        let mut seen = BTreeSet::new();
        best.left.retain(|name| seen.insert(*name));
        Ok(best)
    }

    /// The best checkpoints that have no link, by their scores; none is newer than `newest`.
    fn replacements(&self, newest: Name, left: &[Name], num: usize) -> Vec<Name> {
        let names = folder::checkpoints(&self.dir).unwrap_or_default();
        let others = names.into_iter().filter(|name| *name <= newest && !left.contains(name));
        let scored = others.filter_map(|name| {
            let score = Manifest::read(&self.path(name)).ok()?.score?;
            Some((Score::from(score).height(), name)).filter(|(height, _)| height.is_finite())
        });
        let mut scored: Vec<_> = scored.collect();
        // Of equal scores the earlier one is better.
        scored.sort_by(|(one, a), (other, b)| other.total_cmp(one).then(a.cmp(b)));
        let mut found = Vec::new();
        for (_, name) in scored {
            // One that cannot be read now is not used, but is not lost.
            if found.len() < num && (name == newest || self.is_whole(name).unwrap_or(false)) {
                found.push(name);
            }
        }
        self.mark_damaged();
        found
    }

    /// Whether the checksums match; if not, it is remembered as damaged.
    fn is_whole(&self, name: Name) -> Result<bool, CheckpointError> {
        if self.damaged().contains(&name) {
            return Ok(false);
        }
        let path = self.path(name);
        match check(&path) {
            Ok(()) => Ok(true),
            Err(reason) if reason.is_damage() => {
                self.refuse(name, &reason);
                Ok(false)
            }
            Err(reason) => Err(CheckpointError::Unreadable { path, reason }),
        }
    }

    /// Warns that a checkpoint is damaged, and remembers it.
    pub(super) fn refuse(&self, name: Name, reason: &Refusal) {
        self.warn(&format!("{} cannot be used: {reason}", self.path(name).display()));
        self.damaged().insert(name);
    }

    fn point(&self, link: &str, name: Name) {
        if linked(&self.dir, link) == Some(name) {
            return;
        }
        if let Err(error) = folder::point(&self.dir, link, name) {
            self.warn(&format!("cannot make {} point to {name}: {error}", self.dir.join(link).display()));
        }
    }

    fn warn_of_lost_best(&self, left: &[Name]) {
        let dir = self.dir.display();
        self.warn(&match left.first() {
            Some(first) => format!("a best checkpoint in {dir} was damaged; the best of those that are left is {first}"),
            None => format!("the best checkpoint in {dir} was damaged, and no other was evaluated; the next evaluation counts as the best"),
        });
    }
}

/// What the links to the best point to.
struct Best {
    left: Vec<Name>,
    /// How many are damaged.
    lost: usize,
}

fn entry(manifest: &Manifest) -> BestEntry {
    BestEntry { step: manifest.step, epoch: manifest.epoch, score: manifest.score }
}
