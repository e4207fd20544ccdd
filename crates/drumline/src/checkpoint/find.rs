//! Finding a checkpoint that ranks will read in parts: nobody reads more than its share.
//!
//! ```text
//!   rank 0      manifest of the newest ─broadcast─┐                                ┌─▶ undamaged: take it
//!   all ranks                                     └─▶ 1/N of each file ─▶ CRC-32s ─┴─▶ else the one before
//! ```
//! All N ranks check the files together: rank r reads the r-th of N equal ranges of each file, and the checksum of a
//! file follows from those of its ranges (`read_sums`). So each byte is read once for its checksum, whatever the number
//! of ranks, and nothing of it is kept. Then each rank reads the parts that it needs (`unread`).
//!
//! In: a folder that all ranks see. Out: everything but the tensors. Not here: loading whole tensors (`load`), for
//! which only rank 0 reads.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use drumline_comm::ProcessGroup;
use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, Refusal};
use super::folder::{self, BEST, Name};
use super::load::{ATTEMPTS, First, Head, Loaded, Refused, unusable};
use super::manifest::{FileEntry, Manifest, hex};
use super::on_rank_zero::on_rank_zero;
use super::read_sums::ReadSums;
use super::safetensors::PIECE;
use super::shards::agree;
use super::unread::Unread;
use super::whole_files::wrong_checksum;
use super::{Checkpoints, Role};
use crate::launch::main_first::run_on_all;

/// A checkpoint whose files have the sizes of the manifest. Their contents have not been checked.
#[derive(Serialize, Deserialize)]
struct Candidate {
    path: String,
    /// As JSON text, which keeps the bits of every number.
    manifest: String,
}

/// What rank 0 knows of a search.
#[derive(Default)]
struct Search {
    /// Those that have not been tried.
    left: Vec<Name>,
    /// The one that is tried now.
    tried: Option<Name>,
    refused: Vec<Refused>,
}

impl Checkpoints {
    /// Finds the latest undamaged checkpoint, as [`load_latest`](Self::load_latest) does, but reads no tensors: see
    /// [`Loaded::read_parts`]. All ranks call this together, and all must see the folder.
    #[track_caller]
    pub fn find_latest(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        for _ in 1..ATTEMPTS {
            let names = on_rank_zero(group, || self.candidates())?.unwrap_or_default();
            let found = self.search(names.clone(), group);
            let is_refused = match &found {
                Ok(Some(found)) => !found.refused.is_empty(),
                Err(error) => matches!(error, CheckpointError::NoneUsable { .. }),
                Ok(None) => false,
            };
            // The run that owns the folder may have deleted what a reader was reading, and saved others since.
            let is_other =
                is_refused && self.role == Role::Reader && self.candidates().is_ok_and(|now| now != names);
            let is_root = group.rank() == 0;
            if !matches!(group.broadcast_object(is_root.then_some(&is_other), 0), Ok(true)) {
                return found;
            }
            self.damaged().clear();
        }
        let names = on_rank_zero(group, || self.candidates())?.unwrap_or_default();
        self.search(names, group)
    }

    /// Finds the best checkpoint, as [`load_best`](Self::load_best) does, but reads no tensors.
    #[track_caller]
    pub fn find_best(&self, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let best = on_rank_zero(group, || {
            let best = folder::linked(&self.dir, BEST).map(|name| self.dir.join(name.to_string()));
            best.map(|path| candidate(&path).map_err(|reason| unusable(path, reason))).transpose()
        })?;
        let is_root = group.rank() == 0;
        let Some(found) = group.broadcast_object(is_root.then_some(&best.flatten()), 0)? else {
            return Ok(None);
        };
        let manifest = found.manifest();
        check_together(&found, &manifest, group)?
            .map_err(|reason| unusable(found.path.clone().into(), reason))?;
        found.into_loaded(manifest, Head::default(), group).map(Some)
    }

    /// The first undamaged one of these names, which only rank 0 has.
    fn search(&self, names: Vec<Name>, group: &ProcessGroup) -> Result<Option<Loaded>, CheckpointError> {
        let mut search = Search { left: names, ..Search::default() };
        let is_root = group.rank() == 0;
        loop {
            let next = on_rank_zero(group, || self.next_of(&mut search))?;
            let Some(found) = group.broadcast_object(is_root.then_some(&next.flatten()), 0)? else {
                return Ok(None);
            };
            let manifest = found.manifest();
            let checked = check_together(&found, &manifest, group)?;
            let head = on_rank_zero(group, || self.judge(&mut search, &manifest, checked))?;
            if let Some(head) = group.broadcast_object(is_root.then_some(&head.flatten()), 0)? {
                return found.into_loaded(manifest, head, group).map(Some);
            }
        }
    }

    /// On rank 0: the next one whose manifest and sizes are right.
    fn next_of(&self, search: &mut Search) -> Result<Option<Candidate>, CheckpointError> {
        let found = match self.first(&search.left, candidate) {
            Err(CheckpointError::NoneUsable { dir, refused }) => {
                let refused = search.refused.drain(..).chain(refused).collect();
                return Err(CheckpointError::NoneUsable { dir, refused });
            }
            found => found?,
        };
        let Some(First { name, read, refused }) = found else {
            let (dir, refused) = (self.dir.clone(), std::mem::take(&mut search.refused));
            return if refused.is_empty() {
                Ok(None)
            } else {
                Err(CheckpointError::NoneUsable { dir, refused })
            };
        };
        search.refused.extend(refused);
        let place = search.left.iter().position(|one| *one == name).map_or(0, |place| place + 1);
        search.left.drain(..place);
        search.tried = Some(name);
        Ok(Some(read))
    }

    /// On rank 0: what is said of an undamaged one; `None` if it is damaged, which is remembered.
    fn judge(
        &self,
        search: &mut Search,
        manifest: &Manifest,
        checked: Result<(), Refusal>,
    ) -> Result<Option<Head>, CheckpointError> {
        let Some(name) = search.tried else { return Ok(None) };
        if let Err(reason) = checked {
            self.refuse(name, &reason);
            let path = self.dir.join(name.to_string()).display().to_string();
            search.refused.push(Refused { path, reason: reason.to_string() });
            return Ok(None);
        }
        let best_left = if self.role == Role::Owner { self.repair(name, manifest)? } else { None };
        if !manifest.is_finite {
            self.warn_of_nan(name);
        }
        Ok(Some(Head { refused: std::mem::take(&mut search.refused), best_left }))
    }
}

impl Candidate {
    fn manifest(&self) -> Manifest {
        serde_json::from_str(&self.manifest).expect("rank 0 has read and written it")
    }

    /// The checkpoint without its tensors. Each rank reads the generators, which are small.
    fn into_loaded(
        self,
        manifest: Manifest,
        head: Head,
        group: &ProcessGroup,
    ) -> Result<Loaded, CheckpointError> {
        let opened = Unread::open(Path::new(&self.path), &manifest);
        let (unread, rng) = agree(group, opened)?;
        Loaded::new(self.path.into(), manifest, head, &rng, group.rank())
            .map(|loaded| Loaded { unread: Some(unread), ..loaded })
    }
}

/// Reads the manifest, and checks that all files are there with their sizes.
fn candidate(path: &Path) -> Result<Candidate, Refusal> {
    let manifest = Manifest::read(path)?;
    manifest.files.iter().try_for_each(|(file, entry)| open(path, file, entry).map(drop))?;
    let text = serde_json::to_string(&manifest).expect("a manifest that was read can be written");
    Ok(Candidate { path: path.display().to_string(), manifest: text })
}

fn open(folder: &Path, file: &str, entry: &FileEntry) -> Result<File, Refusal> {
    let opened = File::open(folder.join(file)).map_err(Refusal::unreadable(file))?;
    let len = opened.metadata().map_err(Refusal::unreadable(file))?.len();
    if len != entry.bytes {
        return Err(Refusal::damaged(file, &format!("it has {len} bytes, {} were written", entry.bytes)));
    }
    Ok(opened)
}

/// Checks the checksums of all files, all ranks together. All ranks get the same verdict.
fn check_together(
    found: &Candidate,
    manifest: &Manifest,
    group: &ProcessGroup,
) -> Result<Result<(), Refusal>, CheckpointError> {
    let (path, rank) = (Path::new(&found.path), group.rank());
    let own = run_on_all(group, "a checkpoint", || own_sums(path, manifest, rank, group.size()))?;
    let not_seen = |reason| CheckpointError::NotSeen { path: path.to_owned(), rank, reason };
    let own = agree(group, own.map_err(not_seen))?;
    let mut sums = ReadSums::default();
    group.all_gather_object(&own)?.into_iter().for_each(|one| sums.merge(one));
    Ok(manifest.files.iter().try_for_each(|(file, entry)| {
        let found = sums.of(file, 0..entry.bytes).map(hex);
        if found.as_ref() == Some(&entry.crc32) { Ok(()) } else { Err(wrong_checksum(file, found, entry)) }
    }))
}

/// The checksums of this rank's share of each file.
fn own_sums(path: &Path, manifest: &Manifest, rank: usize, num_ranks: usize) -> Result<ReadSums, Refusal> {
    let mut sums = ReadSums::default();
    let mut piece = vec![0; PIECE];
    for (file, entry) in &manifest.files {
        let opened = open(path, file, entry)?;
        let range = share(entry.bytes, rank, num_ranks);
        let (mut hasher, mut at) = (crc32fast::Hasher::new(), range.start);
        while at < range.end {
            let len = (range.end - at).min(PIECE as u64);
            let piece = &mut piece[..len as usize];
            opened.read_exact_at(piece, at).map_err(Refusal::unreadable(file))?;
            hasher.update(piece);
            at += len;
        }
        sums.add(file, range, hasher.finalize());
    }
    Ok(sums)
}

/// A rank's range of so many bytes.
fn share(len: u64, rank: usize, num_ranks: usize) -> Range<u64> {
    let cut = |rank: usize| (u128::from(len) * rank as u128 / num_ranks as u128) as u64;
    cut(rank)..cut(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_adjacent_and_cover_everything() {
        for (len, num_ranks) in [(0, 3), (1, 3), (2, 3), (1000, 1), (1001, 7), (u64::MAX, 5)] {
            let shares: Vec<_> = (0..num_ranks).map(|rank| share(len, rank, num_ranks)).collect();
            assert_eq!((shares[0].start, shares[num_ranks - 1].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
        }
    }
}
