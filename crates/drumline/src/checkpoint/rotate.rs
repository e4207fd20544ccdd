//! Which checkpoints are deleted after a save. A checkpoint is renamed first, so that a partly deleted one is never
//! loaded.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use super::Checkpoints;
use super::folder::{Name, UNFINISHED, best, checkpoints, entries, linked, sync_folder};
use super::manifest::Manifest;

/// The checkpoints of a folder to which `newest` has just been added.
struct Stock<'a> {
    names: &'a [Name],
    newest: Name,
    best: &'a BTreeSet<Name>,
    /// Damaged ones that could not be renamed.
    damaged: &'a BTreeSet<Name>,
    /// The last one with finite loss and weights.
    last_finite: Option<Name>,
}

impl Stock<'_> {
    /// The ones to delete: all before the last `keep_last`, except the best ones and the last finite one. Damaged ones
    /// do not count, so that they do not displace the fallback. Those of later steps are from a run that went further;
    /// they are kept until this run has come as far.
    fn expendable(&self, keep_last: NonZeroUsize) -> Vec<Name> {
        let counts = |name: &&Name| **name <= self.newest && !self.damaged.contains(name);
        let mut whole: Vec<_> = self.names.iter().filter(counts).collect();
        whole.sort_by(|a, b| b.cmp(a));
        let Some(oldest_kept) = whole.get(keep_last.get() - 1) else { return Vec::new() };
        let is_kept = |name: &&Name| self.best.contains(name) || self.last_finite == Some(**name);
        self.names.iter().filter(|name| name < oldest_kept && !is_kept(name)).copied().collect()
    }
}

impl Checkpoints {
    /// Deletes what is no longer needed now that `newest` is safe on disk. It warns of what cannot be deleted.
    pub(super) fn rotate(&self, newest: Name) -> Vec<Name> {
        // An earlier one of this name may have been refused and deleted.
        self.damaged().remove(&newest);
        let damaged = self.damaged().clone();
        let names = checkpoints(&self.dir).unwrap_or_default();
        let last_finite = self.last_finite(&names, newest, &damaged);
        let stock = Stock { names: &names, newest, best: &self.best(), damaged: &damaged, last_finite };
        let mut old = stock.expendable(self.keep_last);
        old.retain(|name| match delete(&self.dir, *name) {
            Ok(()) => true,
            Err(error) => {
                let path = self.dir.join(name.to_string());
                self.warn(&format!("cannot delete the old checkpoint {}: {error}", path.display()));
                false
            }
        });
        old
    }
}

impl Checkpoints {
    /// The newest one up to `newest` whose loss and weights were finite, according to its manifest. It is kept whatever
    /// a run saves after its loss has become NaN.
    pub(super) fn last_finite(&self, names: &[Name], newest: Name, damaged: &BTreeSet<Name>) -> Option<Name> {
        let is_finite = |name: &Name| {
            let manifest = Manifest::read(&self.dir.join(name.to_string()));
            manifest.is_ok_and(|manifest| manifest.is_finite)
        };
        let whole = names.iter().copied().filter(|name| *name <= newest && !damaged.contains(name));
        whole.rev().find(is_finite)
    }

    /// The best ones according to the links. Links beyond the number to keep, from a run that kept more, are removed.
    fn best(&self) -> BTreeSet<Name> {
        remove_best_from(&self.dir, self.keep_best.get() + 1);
        (1..=self.keep_best.get()).filter_map(|place| linked(&self.dir, &best(place))).collect()
    }
}

/// Removes the links to the best, beginning with this place.
pub(super) fn remove_best_from(dir: &Path, place: usize) {
    for place in place.. {
        if fs::remove_file(dir.join(best(place))).is_err() {
            break;
        }
    }
}

/// Deletes a checkpoint.
pub(super) fn delete(dir: &Path, name: Name) -> std::io::Result<()> {
    let aside = dir.join(format!("{UNFINISHED}old-{name}"));
    fs::rename(dir.join(name.to_string()), &aside)?;
    sync_folder(dir)?;
    fs::remove_dir_all(aside)
}

/// Removes what an interrupted save or deletion has left.
pub(super) fn sweep(dir: &Path, warn: impl Fn(&str)) {
    let left = entries(dir).unwrap_or_default();
    for name in left.iter().filter(|name| name.starts_with(UNFINISHED)) {
        let path = dir.join(name);
        let removed = if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        if let Err(error) = removed {
            warn(&format!("cannot remove {}, left by an interrupted save: {error}", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_the_best_are_kept() {
        let name = |step| Name { step, turn: 1 };
        let names: Vec<_> = [10, 20, 30, 40].map(name).to_vec();
        let finite_up_to = |last_finite: u64, best: Option<u64>, damaged: &[u64], keep_last| {
            let last_finite = Some(name(last_finite));
            let damaged = damaged.iter().copied().map(name).collect();
            let best = best.map(name).into_iter().collect();
            let stock =
                Stock { names: &names, newest: name(40), best: &best, damaged: &damaged, last_finite };
            let old = stock.expendable(NonZeroUsize::new(keep_last).unwrap());
            names.iter().filter(|name| !old.contains(name)).map(|name| name.step).collect::<Vec<_>>()
        };
        let kept = |best, damaged: &[u64], keep_last| finite_up_to(40, best, damaged, keep_last);
        assert_eq!(finite_up_to(10, None, &[], 1), [10, 40]);
        assert_eq!(finite_up_to(30, Some(20), &[], 1), [20, 30, 40]);
        assert_eq!(kept(None, &[], 2), [30, 40]);
        assert_eq!(kept(Some(10), &[], 2), [10, 30, 40]);
        assert_eq!(kept(Some(40), &[], 1), [40]);
        assert_eq!(kept(None, &[], 9), [10, 20, 30, 40]);
        assert_eq!(kept(None, &[30], 2), [20, 30, 40]);
        assert_eq!(kept(None, &[10], 3), [20, 30, 40]);
    }

    #[test]
    fn a_run_that_starts_over_keeps_its_own_and_touches_no_later_ones() {
        let names = [10, 20, 490, 500].map(|step| Name { step, turn: 1 });
        let stock = Stock {
            names: &names,
            newest: names[1],
            best: &BTreeSet::new(),
            damaged: &BTreeSet::new(),
            last_finite: Some(names[1]),
        };
        assert_eq!(stock.expendable(NonZeroUsize::new(2).unwrap()), []);
        assert_eq!(stock.expendable(NonZeroUsize::MIN), names[..1]);
    }
}
