//! Writes one rank's parts of global tensors to a file in the form of PyTorch's distributed checkpoints.

use std::collections::BTreeMap;
use std::path::Path;

use drumline_torch::Named;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::error::CheckpointError;
use super::index::{Index, IndexError};
use super::manifest::{FileEntry, hex};
use super::region::Region;
use super::safetensors::{Entry, Part, Written, write_parts};
use super::section::Section;

/// A part of a global tensor, or a whole tensor.
#[derive(Debug)]
pub struct TensorPart {
    /// The global tensor's name, the same on all ranks.
    pub name: String,
    /// The global tensor's shape.
    pub global_shape: Vec<usize>,
    /// The offset of the part along each dim.
    pub offsets: Vec<usize>,
    /// The part's values.
    pub tensor: Tensor,
}

impl TensorPart {
    /// A whole tensor.
    pub fn whole(named: &Named) -> Self {
        let global_shape = shape_of(&named.tensor);
        let offsets = vec![0; global_shape.len()];
        Self { name: named.name.clone(), global_shape, offsets, tensor: named.tensor.shallow_clone() }
    }
}

/// An undefined tensor has the shape of a scalar here; writing refuses it.
fn shape_of(tensor: &Tensor) -> Vec<usize> {
    let size = if tensor.defined() { tensor.size() } else { Vec::new() };
    size.into_iter().map(|size| size as usize).collect()
}

/// Writes this rank's parts of a section's tensors to a file.
///
/// ```
/// use drumline::checkpoint::{Region, Section, ShardReader, ShardWriter, TensorPart};
///
/// let folder = tempfile::tempdir()?;
/// // Rows 0 to 2 by rank 0, row 3 by rank 1, as two ranks would do it.
/// for (rank, rows) in [(0, vec![1f32, 2., 3., 4., 5., 6.]), (1, vec![7., 8.])] {
///     let mut writer = ShardWriter::new(Section::Model);
///     let tensor = tch::Tensor::from_slice(&rows).view([-1, 2]);
///     writer.add(TensorPart { name: "w".into(), global_shape: vec![4, 2], offsets: vec![rank * 3, 0], tensor })?;
///     writer.write(folder.path(), &Section::Model.shard_file(rank))?;
/// }
/// let reader = ShardReader::open(folder.path())?;
/// let rows = reader.read("w", &Region::new(&[2, 0], &[2, 2], &[4, 2])?)?;
/// assert_eq!(rows, tch::Tensor::from_slice(&[5f32, 6., 7., 8.]).view([2, 2]));
/// assert_eq!(reader.num_bytes_read(), 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardWriter {
    section: Section,
    parts: BTreeMap<String, TensorPart>,
}

/// A file that a rank has written. Rank 0 lists those of all ranks in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Shard {
    pub(super) section: Section,
    pub(super) file: String,
    pub(super) entry: FileEntry,
    pub(super) index: Index,
}

impl Shard {
    /// The description of a file that was written. `global` gives the shape of an entry's global tensor.
    pub(super) fn of<'a>(
        section: Section,
        file: &str,
        written: &'a Written,
        global: impl Fn(&'a Entry) -> &'a Vec<usize>,
    ) -> Result<Self, CheckpointError> {
        let mut index = Index::default();
        for (entry, crc32) in &written.parts {
            index.add(file, entry, Some(global(entry)), Some(hex(*crc32)))?;
        }
        let entry = FileEntry { section, bytes: written.bytes, crc32: hex(written.crc32) };
        Ok(Self { section, file: file.to_owned(), entry, index })
    }
}

impl ShardWriter {
    /// A writer without parts.
    pub fn new(section: Section) -> Self {
        Self { section, parts: BTreeMap::new() }
    }

    /// Adds a part. It must be a box, and the only part of its tensor in the file: PyTorch's form has one for each
    /// name. A flat cut inside a row is several boxes, so cut at rows, or write a file for each box.
    pub fn add(&mut self, part: TensorPart) -> Result<(), CheckpointError> {
        let TensorPart { name, global_shape, offsets, tensor } = &part;
        Region::new(offsets, &shape_of(tensor), global_shape)
            .map_err(|source| IndexError::Region { name: name.clone(), source })?;
        if self.parts.contains_key(name) {
            let cause = "there are two of that name".to_owned();
            return Err(CheckpointError::Tensor { name: name.clone(), cause });
        }
        self.parts.insert(name.clone(), part);
        Ok(())
    }

    /// Writes a new file and syncs it to disk. The name of the file in `folder` is [`Section::file`] or
    /// [`Section::shard_file`].
    pub fn write(&self, folder: &Path, file: &str) -> Result<Shard, CheckpointError> {
        let path = folder.join(file);
        let parts = self.parts.values();
        let parts = parts.map(|TensorPart { name, offsets, tensor, .. }| Part {
            name,
            offsets: offsets.clone(),
            tensor,
        });
        let parts: Vec<Part<'_>> = parts.collect();
        let written = write_parts(&path, &parts).map_err(CheckpointError::of_file(&path))?;
        Shard::of(self.section, file, &written, |entry| &self.parts[&entry.name].global_shape)
    }
}
