//! Which global tensors there are, and which bytes of which files hold a region of one. Pure functions.
//!
//! ```text
//!   "fc.weight": F32, [4, 6] ─┬ chunk: shard-00001-…, offsets [0, 0], shape [2, 6], from byte 512
//!                             └ chunk: shard-00002-…, offsets [2, 0], shape [2, 6], from byte 480
//!
//!   rows 1 and 2 of it, columns 2 to 4 = 12 bytes of shard-00001 from byte 544, 12 of shard-00002 from byte 488
//! ```
//! Any number of files by any number of ranks may hold a tensor, cut along any dims. Its chunks must cover it without
//! overlap. The manifest of a checkpoint has an index for each section; the index of another folder, such as one of
//! PyTorch's, is built from the headers of its files.
//!
//! Not here: reading (`shard_reader`, `whole_files`).

use std::collections::BTreeMap;
use std::ops::Range;

use ::safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::region::{NoSuchRegion, Region, Run, are_disjoint};
use super::safetensors::{Entry, size_of};

/// The part of a tensor that one file holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chunk {
    pub(super) file: String,
    #[serde(flatten)]
    pub(super) region: Region,
    /// Its first byte in the file.
    pub(super) start: u64,
    /// The checksum of its bytes, if the writer has recorded it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) crc32: Option<String>,
}

/// A global tensor, and where its parts are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorEntry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) chunks: Vec<Chunk>,
}

/// All tensors, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Index {
    tensors: BTreeMap<String, TensorEntry>,
}

/// A part of a tensor that a file holds.
pub(super) struct Held<'a> {
    pub(super) name: &'a String,
    pub(super) entry: &'a TensorEntry,
    pub(super) chunk: &'a Chunk,
}

/// Bytes to copy from a file into the memory of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileRead<'a> {
    pub(super) chunk: &'a Chunk,
    /// The range in the file.
    pub(super) from: Range<u64>,
    /// The offset of the first byte in the region's memory.
    pub(super) to: usize,
}

/// Why files do not make up global tensors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// No file has a part of it.
    #[error("there is no tensor `{name}`")]
    NoTensor {
        /// The tensor.
        name: String,
    },
    /// Files disagree on its type or shape.
    #[error("tensor `{name}` is {one} in one file and {other} in another")]
    Different {
        /// The tensor.
        name: String,
        /// Type and number of dims, or shape, in one file.
        one: String,
        /// The same in another file.
        other: String,
    },
    /// Two files hold the same elements of it.
    #[error("tensor `{name}` is in several files: {}", files.join(", "))]
    Overlap {
        /// The tensor.
        name: String,
        /// All files that have a part of it.
        files: Vec<String>,
    },
    /// Elements of it are in no file.
    #[error(
        "tensor `{name}` of shape {shape:?} is not complete: {found} of {expected} elements are in {}",
        files.join(", ")
    )]
    Incomplete {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements that are in files.
        found: usize,
        /// Elements that it has.
        expected: usize,
        /// All files that have a part of it.
        files: Vec<String>,
    },
    /// A part, or a requested region, is not inside of the tensor.
    #[error("tensor `{name}`: {source}")]
    Region {
        /// The tensor.
        name: String,
        /// The region.
        #[source]
        source: NoSuchRegion,
    },
}

impl Index {
    /// Adds a file's part of a tensor of shape `global`. Without `global` the tensor is as large as its parts require.
    pub(super) fn add(
        &mut self,
        file: &str,
        entry: &Entry,
        global: Option<&[usize]>,
        crc32: Option<String>,
    ) -> Result<(), IndexError> {
        let Entry { name, dtype, shape, offsets, bytes } = entry;
        let ends: Vec<usize> =
            offsets.iter().zip(shape).map(|(offset, size)| offset.saturating_add(*size)).collect();
        let global = global.unwrap_or(&ends);
        let region = Region::new(offsets, shape, global);
        let region = region.map_err(|source| IndexError::Region { name: name.clone(), source })?;
        let new = || TensorEntry { dtype: *dtype, shape: global.to_vec(), chunks: Vec::new() };
        let known = self.tensors.entry(name.clone()).or_insert_with(new);
        if known.dtype != *dtype || known.shape.len() != shape.len() {
            let describe = |dtype: Dtype, num_dims| format!("{dtype} with {num_dims} dims");
            let (one, other) = (describe(known.dtype, known.shape.len()), describe(*dtype, shape.len()));
            return Err(IndexError::Different { name: name.clone(), one, other });
        }
        known.shape.iter_mut().zip(global).for_each(|(size, end)| *size = (*size).max(*end));
        known.chunks.push(Chunk { file: file.to_owned(), region, start: bytes.start, crc32 });
        Ok(())
    }

    /// Adds what another rank has written.
    pub(super) fn merge(&mut self, other: Self) -> Result<(), IndexError> {
        for (name, entry) in other.tensors {
            let Some(known) = self.tensors.get_mut(&name) else {
                self.tensors.insert(name, entry);
                continue;
            };
            if (known.dtype, &known.shape) != (entry.dtype, &entry.shape) {
                let describe = |entry: &TensorEntry| format!("{} of shape {:?}", entry.dtype, entry.shape);
                return Err(IndexError::Different { name, one: describe(known), other: describe(&entry) });
            }
            known.chunks.extend(entry.chunks);
        }
        Ok(())
    }

    /// Returns an error unless the chunks of each tensor cover it without overlap.
    pub(super) fn check(&self) -> Result<(), IndexError> {
        self.tensors.iter().try_for_each(|(name, entry)| entry.check(name))
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = (&String, &TensorEntry)> {
        self.tensors.iter()
    }

    /// What a file holds, in the order of its bytes.
    pub(super) fn held_by(&self, file: &str) -> Vec<Held<'_>> {
        let mut held = Vec::new();
        for (name, entry) in &self.tensors {
            let own = entry.chunks.iter().filter(|chunk| chunk.file == file);
            held.extend(own.map(|chunk| Held { name, entry, chunk }));
        }
        held.sort_by_key(|held| held.chunk.start);
        held
    }

    pub(super) fn get(&self, name: &str) -> Result<&TensorEntry, IndexError> {
        self.tensors.get(name).ok_or_else(|| IndexError::NoTensor { name: name.to_owned() })
    }
}

impl Chunk {
    /// How many bytes it has in the file.
    pub(super) fn num_bytes(&self, dtype: Dtype) -> u64 {
        (self.region.num_elements() as u64).saturating_mul(size_of(dtype) as u64)
    }

    /// The bytes of a run in the file, for elements of `size` bytes.
    fn read(&self, run: &Run, size: usize) -> FileRead<'_> {
        let from = self.start + (run.from * size) as u64;
        FileRead { chunk: self, from: from..from + (run.len * size) as u64, to: run.to * size }
    }
}

impl TensorEntry {
    fn files(&self) -> Vec<String> {
        self.chunks.iter().map(|chunk| chunk.file.clone()).collect()
    }

    fn check(&self, name: &str) -> Result<(), IndexError> {
        let regions: Vec<&Region> = self.chunks.iter().map(|chunk| &chunk.region).collect();
        for region in &regions {
            Region::new(region.offsets(), region.shape(), &self.shape)
                .map_err(|source| IndexError::Region { name: name.to_owned(), source })?;
        }
        if !are_disjoint(&regions) {
            return Err(IndexError::Overlap { name: name.to_owned(), files: self.files() });
        }
        let found = regions.iter().map(|region| region.num_elements()).sum();
        let expected = Region::whole(&self.shape).num_elements();
        if found == expected {
            return Ok(());
        }
        let (name, shape, files) = (name.to_owned(), self.shape.clone(), self.files());
        Err(IndexError::Incomplete { name, shape, found, expected, files })
    }

    /// The reads that fill a region of a complete tensor: each byte once, and no others.
    pub(super) fn reads(&self, wanted: &Region) -> Vec<FileRead<'_>> {
        let size = size_of(self.dtype);
        let runs = self.chunks.iter().map(|chunk| (chunk, chunk.region.runs(wanted)));
        let runs = runs.flat_map(|(chunk, runs)| runs.into_iter().map(move |run| (chunk, run)));
        runs.map(|(chunk, run)| chunk.read(&run, size)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::region::tests::{cut_shape, elements, grid};
    use super::*;
    use proptest::prelude::*;

    fn part(name: &str, region: &Region, start: u64) -> Entry {
        let len = (region.num_elements() * 2) as u64;
        let (shape, offsets) = (region.shape().to_vec(), region.offsets().to_vec());
        Entry { name: name.into(), dtype: Dtype::F16, shape, offsets, bytes: start..start + len }
    }

    /// The chunks as files whose elements are their global indices.
    fn files(regions: &[Region], shape: &[usize]) -> BTreeMap<String, Vec<u8>> {
        let file = |(place, region): (usize, &Region)| {
            let numbers =
                elements(region, shape).into_iter().flat_map(|number| (number as u16).to_le_bytes());
            (place.to_string(), [0xff; 8].into_iter().chain(numbers).collect())
        };
        regions.iter().enumerate().map(file).collect()
    }

    fn index(regions: &[Region], global: Option<&[usize]>) -> Result<Index, IndexError> {
        let mut index = Index::default();
        for (place, region) in regions.iter().enumerate() {
            index.add(&place.to_string(), &part("w", region, 8), global, None)?;
        }
        Ok(index)
    }

    proptest! {
        #[test]
        fn a_reader_reads_exactly_the_bytes_of_its_region((shape, cuts, wanted) in cut_shape()) {
            let regions = grid(&shape, &cuts);
            let index = index(&regions, Some(&shape)).unwrap();
            index.check().unwrap();
            let files = files(&regions, &shape);
            let mut memory = vec![0xee; wanted.num_elements() * 2];
            let mut num_bytes = 0;
            for FileRead { chunk, from, to } in index.get("w").unwrap().reads(&wanted) {
                num_bytes += from.end - from.start;
                let from = from.start as usize..from.end as usize;
                memory[to..to + from.len()].copy_from_slice(&files[&chunk.file][from]);
            }
            let expected = elements(&wanted, &shape).into_iter().flat_map(|n| (n as u16).to_le_bytes());
            let expected: Vec<u8> = expected.collect();
            prop_assert_eq!(num_bytes as usize, memory.len());
            prop_assert_eq!(memory, expected);
        }

        #[test]
        fn the_global_shape_follows_from_the_chunks_as_in_pytorch((shape, cuts, _) in cut_shape()) {
            let regions = grid(&shape, &cuts);
            let index = index(&regions, None).unwrap();
            prop_assert_eq!(&index.get("w").unwrap().shape, &shape);
            index.check().unwrap();
        }

        #[test]
        fn a_missing_or_repeated_chunk_is_an_error((shape, cuts, _) in cut_shape(), which in 0usize..64) {
            let mut regions = grid(&shape, &cuts);
            let which = which % regions.len();
            let is_empty = regions[which].num_elements() == 0;
            let lost = regions.remove(which);
            let checked = index(&regions, Some(&shape)).unwrap().check();
            // A tensor without any part in a file is not known at all.
            prop_assert_eq!(checked.is_ok(), is_empty || regions.is_empty());
            regions.extend([lost.clone(), lost]);
            prop_assert_eq!(index(&regions, Some(&shape)).unwrap().check().is_ok(), is_empty);
        }
    }

    #[test]
    fn chunks_that_do_not_match_are_named() {
        let rows = |from: usize, num: usize| Region::new(&[from, 0], &[num, 2], &[9, 2]).unwrap();
        let message =
            |index: Result<Index, IndexError>| index.and_then(|index| index.check()).unwrap_err().to_string();
        assert_eq!(message(index(&[rows(0, 2), rows(1, 2)], None)), "tensor `w` is in several files: 0, 1");
        let gap = message(index(&[rows(0, 2), rows(3, 1)], None));
        assert_eq!(gap, "tensor `w` of shape [4, 2] is not complete: 6 of 8 elements are in 0, 1");
        let outside = message(index(&[rows(3, 2)], Some(&[4, 2])));
        assert!(
            outside.starts_with("tensor `w`: offsets [3, 0] and shape [2, 2] are no region of"),
            "{outside}"
        );
        let mut mixed = index(&[rows(0, 2)], None).unwrap();
        let other = Entry { dtype: Dtype::F32, ..part("w", &rows(2, 1), 8) };
        let error = mixed.add("1", &other, None, None).unwrap_err().to_string();
        assert_eq!(error, "tensor `w` is F16 with 2 dims in one file and F32 with 2 dims in another");
        let [one, other] = [[2, 2], [3, 2]].map(|shape| index(&[rows(0, 2)], Some(&shape)).unwrap());
        let error = { one }.merge(other).unwrap_err().to_string();
        assert_eq!(error, "tensor `w` is F16 of shape [2, 2] in one file and F16 of shape [3, 2] in another");
        assert_eq!(Index::default().get("w").unwrap_err().to_string(), "there is no tensor `w`");
    }
}
