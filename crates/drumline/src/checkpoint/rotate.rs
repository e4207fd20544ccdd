//! Which checkpoints go when a new one is there, and how: renamed first, so that one which is half deleted is never taken for one.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use super::Checkpoints;
use super::folder::{Name, UNFINISHED, best, checkpoints, entries, linked, sync_folder};
use super::manifest::Manifest;

/// What is in a folder, when `newest` has just been added.
struct Stock<'a> {
    names: &'a [Name],
    newest: Name,
    best: &'a BTreeSet<Name>,
    /// Those that were found damaged, and could not be renamed.
    damaged: &'a BTreeSet<Name>,
    /// The last whose loss and weights were finite.
    last_finite: Option<Name>,
}

impl Stock<'_> {
    /// The ones to delete: all before the last `keep_last`, but none of the best, and not the last that was finite. One that was found
    /// damaged counts for nothing, so that it does not push out the one that loading fell back to. Those of later steps are of a run that went further, and are
    /// left alone until this one has come as far.
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
    /// Deletes what is no longer needed now that there is `newest`, which is safe: a warning names what cannot be deleted, and it stays.
    pub(super) fn rotate(&self, newest: Name) -> Vec<Name> {
        // One of that name may have been refused, and deleted since.
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
    /// The newest of those up to `newest` whose loss and weights were finite, by its manifest: whatever a run saves after it has gone to
    /// NaN, there is one to go back to.
    pub(super) fn last_finite(&self, names: &[Name], newest: Name, damaged: &BTreeSet<Name>) -> Option<Name> {
        let is_finite = |name: &Name| {
            let manifest = Manifest::read(&self.dir.join(name.to_string()));
            manifest.is_ok_and(|manifest| manifest.is_finite)
        };
        let whole = names.iter().copied().filter(|name| *name <= newest && !damaged.contains(name));
        whole.rev().find(is_finite)
    }

    /// Those that links call the best. Links beyond the number that is kept, of a run that kept more, go.
    fn best(&self) -> BTreeSet<Name> {
        remove_best_from(&self.dir, self.keep_best.get() + 1);
        (1..=self.keep_best.get()).filter_map(|place| linked(&self.dir, &best(place))).collect()
    }
}

/// Removes the links to the best from this place on.
pub(super) fn remove_best_from(dir: &Path, place: usize) {
    for place in place.. {
        if fs::remove_file(dir.join(best(place))).is_err() {
            break;
        }
    }
}

/// Takes a checkpoint away.
pub(super) fn delete(dir: &Path, name: Name) -> std::io::Result<()> {
    let aside = dir.join(format!("{UNFINISHED}old-{name}"));
    fs::rename(dir.join(name.to_string()), &aside)?;
    sync_folder(dir)?;
    fs::remove_dir_all(aside)
}

/// Removes what an interrupted save or deletion has left behind.
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
