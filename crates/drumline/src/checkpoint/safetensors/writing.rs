//! Writing: header and tensors in one pass, hashed on the way.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use crc32fast::Hasher;
use drumline_files::{Durability, Replacement};
use drumline_torch::{Named, TorchError, bytes};
use tch::{Device, Tensor};

use super::super::folder::create_synced;
use super::{Entry, Header, PIECE, SafetensorsError, dtype_of};

/// A part of a global tensor.
pub(in super::super) struct Part<'a> {
    pub(in super::super) name: &'a str,
    /// Its offsets in the global tensor.
    pub(in super::super) offsets: Vec<usize>,
    pub(in super::super) tensor: &'a Tensor,
}

impl<'a> Part<'a> {
    /// All of a tensor.
    pub(in super::super) fn whole(named: &'a Named) -> Self {
        let num_dims = if named.tensor.defined() { named.tensor.dim() } else { 0 };
        Self { name: &named.name, offsets: vec![0; num_dims], tensor: &named.tensor }
    }

    fn entry(&self) -> Result<Entry, SafetensorsError> {
        let dtype = dtype_of(self.name, self.tensor)?;
        let shape = self.tensor.size().into_iter().map(|size| size as usize).collect();
        Ok(Entry { name: self.name.to_owned(), dtype, shape, offsets: self.offsets.clone(), bytes: 0..0 })
    }
}

/// A file that was written and synced to disk.
pub(in super::super) struct Written {
    pub(in super::super) bytes: u64,
    pub(in super::super) crc32: u32,
    /// Each part with the checksum of its bytes.
    pub(in super::super) parts: Vec<(Entry, u32)>,
}

/// Makes the tensor of this name. It is called once for each tensor, when it is written.
pub(in super::super) type Make<'a> = dyn Fn(&str) -> Result<Tensor, SafetensorsError> + 'a;

/// Tensors that are made one after the other, while they are written.
pub(in super::super) struct Made<'a> {
    /// The name, type and shape of each.
    pub(in super::super) entries: Vec<Entry>,
    pub(in super::super) make: Box<Make<'a>>,
}

impl<'a> Made<'a> {
    /// Tensors that are there.
    fn of_parts(parts: &'a [Part<'a>]) -> Result<Self, SafetensorsError> {
        let entries = parts.iter().map(Part::entry).collect::<Result<_, _>>()?;
        let tensors: BTreeMap<_, _> = parts.iter().map(|part| (part.name, part.tensor)).collect();
        Ok(Self { entries, make: Box::new(move |name| Ok(tensors[name].shallow_clone())) })
    }
}

/// Writes parts to a new file, and syncs it to disk.
pub(in super::super) fn write_parts(path: &Path, parts: &[Part<'_>]) -> Result<Written, SafetensorsError> {
    write_made(path, Made::of_parts(parts)?)
}

/// Replaces the file at `path` by one with these parts, once that is complete and on disk.
pub(super) fn replace_parts(path: &Path, parts: &[Part<'_>]) -> Result<(), SafetensorsError> {
    replace_made(path, Made::of_parts(parts)?)
}

/// Writes tensors to a new file while they are made, and syncs it to disk.
pub(in super::super) fn write_made(path: &Path, made: Made<'_>) -> Result<Written, SafetensorsError> {
    let contents = Contents::new(made)?;
    create_synced(path, |file| contents.write_to(file))
}

/// Replaces the file at `path` by one with tensors that are made meanwhile, once that is complete and on disk.
pub(in super::super) fn replace_made(path: &Path, made: Made<'_>) -> Result<(), SafetensorsError> {
    let contents = Contents::new(made)?;
    let mut file = Replacement::new(path)?;
    contents.write_to(&mut file)?;
    Ok(file.commit(Durability::Disk)?)
}

/// What a file will hold.
struct Contents<'a> {
    header: Header,
    make: Box<Make<'a>>,
}

impl<'a> Contents<'a> {
    fn new(Made { entries, make }: Made<'a>) -> Result<Self, SafetensorsError> {
        Ok(Self { header: Header::new(entries)?, make })
    }

    fn write_to(self, file: &mut impl Write) -> Result<Written, SafetensorsError> {
        let Self { header, make } = self;
        let (start, mut whole, mut sums) = (header.encode(), Hasher::new(), Vec::new());
        whole.update(&start);
        file.write_all(&start)?;
        for Entry { name, .. } in &header.entries {
            let plain = plain(name, &make(name)?)?;
            let sum = write_hashed(file, bytes(&plain).map_err(io::Error::other)?)?;
            whole.combine(&sum);
            sums.push(sum.finalize());
        }
        let bytes = header.entries.last().map_or(header.len, |last| last.bytes.end);
        Ok(Written { bytes, crc32: whole.finalize(), parts: header.entries.into_iter().zip(sums).collect() })
    }
}

fn write_hashed(file: &mut impl Write, bytes: &[u8]) -> io::Result<Hasher> {
    let mut sum = Hasher::new();
    for piece in bytes.chunks(PIECE) {
        sum.update(piece);
        file.write_all(piece)?;
    }
    Ok(sum)
}

/// The tensor as a contiguous one in host memory; the tensor itself if it is one.
fn plain(name: &str, tensor: &Tensor) -> Result<Tensor, SafetensorsError> {
    let plain = || {
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?;
        tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()
    };
    plain().map_err(|error| SafetensorsError::Unsavable {
        name: name.to_owned(),
        cause: TorchError::from(error).to_string(),
    })
}
