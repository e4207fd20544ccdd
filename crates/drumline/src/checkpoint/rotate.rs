//! Which checkpoints go when a new one is there, and how: renamed first, so that one which is half deleted is never taken for one.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use super::folder::{BEST, Name, UNFINISHED, checkpoints, entries, linked, sync_folder};

/// The ones to delete: all before the last `keep_last`, but not the best. One that was found damaged counts for nothing, so
/// that it does not push out the one that was used in its place.
fn expendable(
    names: &[Name],
    best: Option<Name>,
    damaged: &BTreeSet<Name>,
    keep_last: NonZeroUsize,
) -> Vec<Name> {
    let mut whole: Vec<_> = names.iter().filter(|name| !damaged.contains(name)).collect();
    whole.sort_by(|a, b| b.cmp(a));
    let Some(oldest_kept) = whole.get(keep_last.get() - 1) else { return Vec::new() };
    names.iter().filter(|name| name < oldest_kept && Some(**name) != best).copied().collect()
}

/// Deletes what is no longer needed. A new checkpoint is safe by now: what cannot be deleted is told and left.
pub(super) fn rotate(dir: &Path, damaged: &BTreeSet<Name>, keep_last: NonZeroUsize) -> Vec<Name> {
    let names = checkpoints(dir).unwrap_or_default();
    let mut old = expendable(&names, linked(dir, BEST), damaged, keep_last);
    old.retain(|name| match delete(dir, *name) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(
                "cannot delete the old checkpoint {}: {error}",
                dir.join(name.to_string()).display()
            );
            false
        }
    });
    old
}

/// Takes a checkpoint away.
pub(super) fn delete(dir: &Path, name: Name) -> std::io::Result<()> {
    let aside = dir.join(format!("{UNFINISHED}old-{name}"));
    fs::rename(dir.join(name.to_string()), &aside)?;
    sync_folder(dir)?;
    fs::remove_dir_all(aside)
}

/// Removes what an interrupted save or deletion has left behind.
pub(super) fn sweep(dir: &Path) {
    let left = entries(dir).unwrap_or_default();
    for name in left.iter().filter(|name| name.starts_with(UNFINISHED)) {
        let path = dir.join(name);
        let removed = if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        if let Err(error) = removed {
            tracing::warn!("cannot remove {}, left by an interrupted save: {error}", path.display());
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
        let kept = |best: Option<u64>, damaged: &[u64], keep_last| {
            let damaged = damaged.iter().copied().map(name).collect();
            let old = expendable(&names, best.map(name), &damaged, NonZeroUsize::new(keep_last).unwrap());
            names.iter().filter(|name| !old.contains(name)).map(|name| name.step).collect::<Vec<_>>()
        };
        assert_eq!(kept(None, &[], 2), [30, 40]);
        assert_eq!(kept(Some(10), &[], 2), [10, 30, 40]);
        assert_eq!(kept(Some(40), &[], 1), [40]);
        assert_eq!(kept(None, &[], 9), [10, 20, 30, 40]);
        assert_eq!(kept(None, &[30], 2), [20, 30, 40]);
        assert_eq!(kept(None, &[10], 3), [20, 30, 40]);
    }
}
