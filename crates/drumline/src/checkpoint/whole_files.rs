//! Reads whole files of a checkpoint. Size and checksum must match the manifest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use drumline_torch::{Named, bytes_mut};
use tch::Tensor;

use super::error::Refusal;
use super::index::{Held, Index};
use super::manifest::{FileEntry, hex};
use super::region::Region;
use super::safetensors::{PIECE, empty, size_of};

/// The size of the read buffer. It helps for short runs, such as those of a tensor that is cut along its last dim.
const BUFFER: usize = 1 << 18;

/// Reads all tensors of an index from its files, which must match their entries.
pub(super) fn read(
    folder: &Path,
    files: &BTreeMap<&str, &FileEntry>,
    index: &Index,
) -> Result<Vec<Named>, Refusal> {
    let mut tensors = BTreeMap::new();
    for (name, entry) in index.tensors() {
        let file = entry.chunks.first().map_or("", |chunk| &chunk.file);
        let tensor = empty(name, entry.dtype, &entry.shape).map_err(Refusal::of_file(file))?;
        tensors.insert(name, tensor);
    }
    for (name, entry) in files {
        let mut file = Whole::open(folder, name, entry)?;
        let filled = file.fill(index, &mut tensors);
        // Wrong bytes may have stopped the reading early. The checksum, for which the whole file is read, is the better
        // reason then.
        file.finish(entry)?;
        filled?;
    }
    Ok(tensors.into_iter().map(|(name, tensor)| Named { name: name.clone(), tensor }).collect())
}

/// Reads a file and compares it with `entry`, without keeping its contents.
pub(super) fn check(folder: &Path, name: &str, entry: &FileEntry) -> Result<(), Refusal> {
    Whole::open(folder, name, entry)?.finish(entry)
}

/// A file that is read once, and hashed on the way.
struct Whole<'a> {
    name: &'a str,
    file: BufReader<File>,
    hasher: crc32fast::Hasher,
    position: u64,
}

impl<'a> Whole<'a> {
    fn open(folder: &Path, name: &'a str, entry: &FileEntry) -> Result<Self, Refusal> {
        let file = File::open(folder.join(name)).map_err(Refusal::unreadable(name))?;
        let len = file.metadata().map_err(Refusal::unreadable(name))?.len();
        if len != entry.bytes {
            return Err(Refusal::damaged(name, &format!("it has {len} bytes, {} were written", entry.bytes)));
        }
        let file = BufReader::with_capacity(BUFFER, file);
        Ok(Self { name, file, hasher: crc32fast::Hasher::new(), position: 0 })
    }

    /// Fills the tensors with this file's parts.
    fn fill(&mut self, index: &Index, tensors: &mut BTreeMap<&String, Tensor>) -> Result<(), Refusal> {
        for Held { name, entry, chunk } in index.held_by(self.name) {
            let (size, whole) = (size_of(entry.dtype), Region::whole(&entry.shape));
            let tensor = tensors.get_mut(name).expect("there is one for each of the index");
            let memory = bytes_mut(tensor).map_err(|error| Refusal::tensors(self.name, &error))?;
            self.skip_to(chunk.start)?;
            for run in chunk.region.runs(&whole) {
                self.read(&mut memory[run.to * size..(run.to + run.len) * size])?;
            }
        }
        Ok(())
    }

    fn read(&mut self, memory: &mut [u8]) -> Result<(), Refusal> {
        for piece in memory.chunks_mut(PIECE) {
            self.file.read_exact(piece).map_err(Refusal::unreadable(self.name))?;
            self.hasher.update(piece);
            self.position += piece.len() as u64;
        }
        Ok(())
    }

    fn skip_to(&mut self, start: u64) -> Result<(), Refusal> {
        let mut left = start.saturating_sub(self.position);
        let mut piece = vec![0; PIECE.min(left as usize)];
        while left > 0 {
            let len = piece.len().min(left as usize);
            self.read(&mut piece[..len])?;
            left -= len as u64;
        }
        Ok(())
    }

    /// Reads the rest, and compares the checksum.
    fn finish(mut self, entry: &FileEntry) -> Result<(), Refusal> {
        self.skip_to(entry.bytes)?;
        let found = hex(self.hasher.finalize());
        if found == entry.crc32 {
            return Ok(());
        }
        Err(wrong_checksum(self.name, Some(found), entry))
    }
}

/// The reason for a file whose checksum is another one, or unknown because bytes of it were not read.
pub(super) fn wrong_checksum(file: &str, found: Option<String>, entry: &FileEntry) -> Refusal {
    let found = found.unwrap_or_else(|| "unknown".to_owned());
    Refusal::damaged(file, &format!("its checksum is {found}, expected {}", entry.crc32))
}
