//! Writing: header and tensors in one pass, hashed on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use crc32fast::Hasher;
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

/// Writes parts to a new file, and syncs it to disk.
pub(in super::super) fn write_parts(path: &Path, parts: &[Part<'_>]) -> Result<Written, SafetensorsError> {
    let entries = parts.iter().map(Part::entry).collect::<Result<_, _>>()?;
    let header = Header::new(entries)?;
    let tensors: BTreeMap<&str, &Tensor> = parts.iter().map(|part| (part.name, part.tensor)).collect();
    let mut failed = None;
    let written = create_synced(path, |file| {
        let (start, mut whole, mut sums) = (header.encode(), Hasher::new(), Vec::new());
        whole.update(&start);
        file.write_all(&start)?;
        for Entry { name, .. } in &header.entries {
            let plain = plain(name, tensors[name.as_str()]).map_err(|error| failed = Some(error));
            let Ok(plain) = plain else { break };
            let sum = write_hashed(file, bytes(&plain).map_err(io::Error::other)?)?;
            whole.combine(&sum);
            sums.push(sum.finalize());
        }
        Ok((whole.finalize(), sums))
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let (crc32, sums) = written?;
    let bytes = header.entries.last().map_or(header.len, |last| last.bytes.end);
    Ok(Written { bytes, crc32, parts: header.entries.into_iter().zip(sums).collect() })
}

fn write_hashed(file: &mut File, bytes: &[u8]) -> io::Result<Hasher> {
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
