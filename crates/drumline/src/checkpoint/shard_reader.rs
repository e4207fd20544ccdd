//! Reads regions of global tensors from the files of a folder: only the bytes that a region needs.
//!
//! The folder is one of our checkpoints, or any with safetensors files, such as one that PyTorch's
//! `HuggingFaceStorageWriter` has written. The way tensors are cut in the files and the requested regions are
//! independent.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ::safetensors::tensor::Dtype;
use drumline_torch::bytes_mut;
use tch::Tensor;

use super::error::{CheckpointError, Refusal};
use super::folder;
use super::index::{Chunk, FileRead, Index, IndexError, TensorEntry};
use super::load::unusable;
use super::manifest::{Manifest, hex};
use super::read_sums::ReadSums;
use super::region::Region;
use super::safetensors::{self, Header};
use super::section::Section;

/// Reads global tensors, or regions of them, from any number of files.
#[derive(Debug)]
pub struct ShardReader {
    folder: PathBuf,
    index: Index,
    files: RefCell<BTreeMap<String, File>>,
    num_bytes_read: Cell<u64>,
    sums: RefCell<ReadSums>,
}

impl ShardReader {
    /// Opens all tensors of a folder's `.safetensors` files. Their headers are read, and must make up complete tensors.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let search = |source| CheckpointError::Search { path: folder.to_owned(), source };
        let mut files = folder::entries(folder).map_err(search)?;
        files.retain(|file| file.ends_with(".safetensors"));
        files.sort();
        let mut index = Index::default();
        for file in files {
            add_header(&mut index, folder, &file).map_err(|reason| unusable(folder.to_owned(), reason))?;
        }
        Self::new(folder, index)
    }

    /// Opens the tensors of one section of a checkpoint, using its manifest. A missing or short file is an error when
    /// it is read, and so is a changed byte in a part that this rank reads completely. For other parts see
    /// [`check`](Self::check).
    pub fn open_section(checkpoint: &Path, section: Section) -> Result<Self, CheckpointError> {
        let index = Manifest::read(checkpoint).and_then(|manifest| manifest.index(checkpoint, section));
        Self::new(checkpoint, index.map_err(|reason| unusable(checkpoint.to_owned(), reason))?)
    }

    /// Opens the tensors of an index, which must be complete.
    pub(super) fn new(folder: &Path, index: Index) -> Result<Self, CheckpointError> {
        index.check()?;
        let (files, num_bytes_read, sums) = (RefCell::default(), Cell::new(0), RefCell::default());
        Ok(Self { folder: folder.to_owned(), index, files, num_bytes_read, sums })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.tensors().map(|(name, _)| name.as_str())
    }

    /// The shape of a global tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.index.get(name)?.shape)
    }

    /// How many bytes of tensors have been read.
    pub fn num_bytes_read(&self) -> u64 {
        self.num_bytes_read.get()
    }

    /// Reads a whole tensor.
    pub fn read_whole(&self, name: &str) -> Result<Tensor, CheckpointError> {
        self.read(name, &Region::whole(self.shape(name)?))
    }

    /// Reads a region of a tensor into host memory.
    pub fn read(&self, name: &str, wanted: &Region) -> Result<Tensor, CheckpointError> {
        let entry = self.index.get(name)?;
        Region::new(wanted.offsets(), wanted.shape(), &entry.shape)
            .map_err(|source| IndexError::Region { name: name.to_owned(), source })?;
        let mut tensor = safetensors::empty(name, entry.dtype, wanted.shape())?;
        let memory = bytes_mut(&mut tensor)?;
        self.fill(memory, entry, wanted).map_err(|reason| unusable(self.folder.clone(), reason))?;
        Ok(tensor)
    }

    /// The checksums of everything that was read so far. Merge those of all ranks for [`check`](Self::check).
    pub fn sums(&self) -> ReadSums {
        self.sums.borrow().clone()
    }

    /// Checks the checksums of all parts that were read completely, in any pieces and by any ranks.
    pub fn check(&self, sums: &ReadSums) -> Result<(), CheckpointError> {
        let mut entries = self.index.tensors();
        let checked = entries.try_for_each(|(_, entry)| {
            entry.chunks.iter().try_for_each(|chunk| check_chunk(chunk, entry.dtype, sums))
        });
        checked.map_err(|reason| unusable(self.folder.clone(), reason))
    }

    fn fill(&self, memory: &mut [u8], entry: &TensorEntry, wanted: &Region) -> Result<(), Refusal> {
        for FileRead { chunk, from, to } in entry.reads(wanted) {
            let len = from.end - from.start;
            let piece = &mut memory[to..to + len as usize];
            self.read_at(&chunk.file, piece, from.start)?;
            self.num_bytes_read.set(self.num_bytes_read.get() + len);
            self.sums.borrow_mut().add(&chunk.file, from, crc32fast::hash(piece));
        }
        let shares = |chunk: &&Chunk| chunk.region.intersection(wanted).is_some();
        let mut read = entry.chunks.iter().filter(shares);
        read.try_for_each(|chunk| check_chunk(chunk, entry.dtype, &self.sums.borrow()))
    }

    fn read_at(&self, file: &str, piece: &mut [u8], start: u64) -> Result<(), Refusal> {
        let mut files = self.files.borrow_mut();
        if !files.contains_key(file) {
            let opened = File::open(self.folder.join(file)).map_err(Refusal::unreadable(file))?;
            files.insert(file.to_owned(), opened);
        }
        files[file].read_exact_at(piece, start).map_err(Refusal::unreadable(file))
    }
}

/// Checks the checksum of a part, if all of it was read and its writer has recorded it.
fn check_chunk(chunk: &Chunk, dtype: Dtype, sums: &ReadSums) -> Result<(), Refusal> {
    let bytes = chunk.start..chunk.start + chunk.num_bytes(dtype);
    let found = sums.of(&chunk.file, bytes).map(hex);
    match (&chunk.crc32, found) {
        (Some(written), Some(found)) if *written != found => {
            let what = format!("the checksum of a tensor in it is {found}, expected {written}");
            Err(Refusal::damaged(&chunk.file, &what))
        }
        _ => Ok(()),
    }
}

/// Adds the tensors of a file, from its header.
pub(super) fn add_header(index: &mut Index, folder: &Path, file: &str) -> Result<(), Refusal> {
    let mut opened = File::open(folder.join(file)).map_err(Refusal::unreadable(file))?;
    let header = Header::read(&mut opened).map_err(Refusal::of_file(file))?;
    let added = header.entries.iter().try_for_each(|entry| index.add(file, entry, None, None));
    added.map_err(|error| Refusal::damaged(file, &error))
}
