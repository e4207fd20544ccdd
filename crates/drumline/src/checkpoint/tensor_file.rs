//! Tensors in a safetensors file, written from their memory and read into it.
//!
//! ```text
//!   8 bytes: length of the header │ header (JSON: name, dtype, shape, offsets) │ bytes of the tensors, one after another
//! ```
//! The checksum is computed on the way, so a file is gone through once. Tensors that are scattered or on a GPU are copied one at a
//! time. Wide elements come first, so that all lie as their type wants it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use drumline_torch::{Named, TorchError, bytes, bytes_mut};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use tch::{Device, Kind, Tensor};

use super::error::{CheckpointError, Refusal};
use super::folder::create_synced;
use super::manifest::{FileEntry, hex};

/// Bytes that are hashed and written in one go: few calls, and still in the cache for the second of the two.
const PIECE: usize = 1 << 20;

/// The longest header that is read, as in Python's safetensors.
const LONGEST_HEADER: u64 = 100_000_000;

/// Writes the tensors, safe on disk when this returns.
pub(super) fn write(path: &Path, tensors: &[Named]) -> Result<FileEntry, CheckpointError> {
    let mut tensors: Vec<(&Named, Dtype)> =
        tensors.iter().map(|named| Ok((named, dtype_of(named)?))).collect::<Result<_, CheckpointError>>()?;
    tensors.sort_by(|(a, a_type), (b, b_type)| b_type.cmp(a_type).then_with(|| a.name.cmp(&b.name)));
    let header = header(&tensors)?;
    let mut failed = None;
    let written = create_synced(path, |file| {
        let mut out = Hashed { inner: file, hasher: crc32fast::Hasher::new(), bytes: 0 };
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (named, _) in &tensors {
            let Some(plain) = plain(named).map_err(|error| failed = Some(error)).ok() else { break };
            let bytes = bytes(&plain).map_err(io::Error::other)?;
            bytes.chunks(PIECE).try_for_each(|piece| out.write_all(piece))?;
        }
        Ok(out.entry())
    });
    match failed {
        Some(error) => Err(error),
        None => written.map_err(CheckpointError::write(path)),
    }
}

fn header(tensors: &[(&Named, Dtype)]) -> Result<Vec<u8>, CheckpointError> {
    let mut start = 0;
    let infos = tensors.iter().map(|(named, dtype)| {
        let shape: Vec<usize> = named.tensor.size().into_iter().map(|size| size as usize).collect();
        let end = start + named.tensor.numel() * dtype.bitsize() / 8;
        let info = TensorInfo { dtype: *dtype, shape, data_offsets: (start, end) };
        start = end;
        (named.name.clone(), info)
    });
    let infos: Vec<_> = infos.collect();
    let mut names: Vec<_> = infos.iter().map(|(name, _)| name).collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(unfit(twice[0], "there are two of that name"));
    }
    // What Python's libraries look for to know whose tensors these are.
    let origin = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(origin), infos).expect("offsets follow from the shapes");
    let mut header = serde_json::to_vec(&metadata).expect("metadata has only string keys");
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

/// The tensor's values in a row in the CPU's memory: itself if they are already so.
fn plain(named: &Named) -> Result<Tensor, CheckpointError> {
    let plain = || {
        let tensor = named.tensor.f_detach()?.f_to_device(Device::Cpu)?;
        tensor.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()
    };
    plain().map_err(|error| unfit(&named.name, &TorchError::from(error).to_string()))
}

/// Reads the tensors of a file, which must be as `entry` says.
pub(super) fn read(folder: &Path, name: &str, entry: &FileEntry) -> Result<Vec<Named>, Refusal> {
    let mut file = open(folder, name, entry)?;
    let tensors = read_metadata(&mut file, name, entry.bytes).and_then(|metadata| {
        metadata.offset_keys().into_iter().map(|key| read_tensor(&mut file, name, (&metadata, key))).collect()
    });
    // A wrong header may have stopped the reading early; the checksum is the better reason then, and takes the whole file.
    file.finish(name, entry)?;
    tensors
}

/// Reads a file, which must be as `entry` says, and keeps nothing of it.
pub(super) fn check(folder: &Path, name: &str, entry: &FileEntry) -> Result<(), Refusal> {
    open(folder, name, entry)?.finish(name, entry)
}

fn open(folder: &Path, name: &str, entry: &FileEntry) -> Result<Hashed<File>, Refusal> {
    let file = File::open(folder.join(name)).map_err(Refusal::unreadable(name))?;
    let len = file.metadata().map_err(Refusal::unreadable(name))?.len();
    if len != entry.bytes {
        return Err(Refusal::damaged(name, format!("it has {len} bytes, {} were written", entry.bytes)));
    }
    Ok(Hashed { inner: file, hasher: crc32fast::Hasher::new(), bytes: 0 })
}

fn read_metadata(file: &mut Hashed<File>, name: &str, len: u64) -> Result<Metadata, Refusal> {
    let mut header_len = [0; 8];
    file.read_exact(&mut header_len).map_err(Refusal::unreadable(name))?;
    let header_len = u64::from_le_bytes(header_len);
    if header_len > LONGEST_HEADER.min(len.saturating_sub(8)) {
        return Err(Refusal::damaged(name, format!("its header claims {header_len} bytes")));
    }
    let mut header = Vec::new();
    header.try_reserve_exact(header_len as usize).map_err(|cause| Refusal::tensors(name, cause))?;
    header.resize(header_len as usize, 0);
    file.read_exact(&mut header).map_err(Refusal::unreadable(name))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| Refusal::damaged(name, format!("its header: {error}")))?;
    let rest = len - 8 - header_len;
    if metadata.data_len() as u64 != rest {
        let what = format!("its header claims {} bytes of tensors, there are {rest}", metadata.data_len());
        return Err(Refusal::damaged(name, what));
    }
    Ok(metadata)
}

fn read_tensor(
    file: &mut Hashed<File>,
    name: &str,
    (metadata, key): (&Metadata, String),
) -> Result<Named, Refusal> {
    let info = metadata.info(&key).expect("the key is the metadata's own");
    let spec = Spec { name: key, dtype: info.dtype, shape: info.shape.clone() };
    // The header's sizes are those of the file: what does not fit into memory is whole.
    let mut named = spec.empty().map_err(|error| Refusal::tensors(name, error))?;
    let bytes = bytes_mut(&mut named.tensor).map_err(|error| Refusal::tensors(name, error))?;
    bytes
        .chunks_mut(PIECE)
        .try_for_each(|piece| file.read_exact(piece))
        .map_err(Refusal::unreadable(name))?;
    Ok(named)
}

/// A tensor without its values.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Spec {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Spec {
    pub(super) fn of(named: &Named) -> Result<Self, CheckpointError> {
        let shape = named.tensor.size().into_iter().map(|size| size as usize).collect();
        Ok(Self { name: named.name.clone(), dtype: dtype_of(named)?, shape })
    }

    /// A tensor like this, with any values.
    pub(super) fn empty(self) -> Result<Named, TorchError> {
        let kind = PAIRS.iter().find(|(_, dtype)| *dtype == self.dtype).map(|(kind, _)| *kind);
        let no_kind = || {
            TorchError::Unfit(format!(
                "tensor `{}` is of type {}, which tensors cannot have",
                self.name, self.dtype
            ))
        };
        let kind = kind.ok_or_else(no_kind)?;
        let shape: Vec<i64> = self.shape.iter().map(|size| *size as i64).collect();
        Ok(Named { tensor: Tensor::f_empty(&shape, (kind, Device::Cpu))?, name: self.name })
    }
}

/// Element types that both libtorch and safetensors have.
const PAIRS: [(Kind, Dtype); 14] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

fn dtype_of(named: &Named) -> Result<Dtype, CheckpointError> {
    if !named.tensor.defined() {
        return Err(unfit(&named.name, "it is undefined"));
    }
    let kind =
        named.tensor.f_kind().map_err(|error| unfit(&named.name, &TorchError::from(error).to_string()))?;
    let pair = PAIRS.iter().find(|(ours, _)| *ours == kind);
    pair.map(|(_, dtype)| *dtype)
        .ok_or_else(|| unfit(&named.name, &format!("safetensors has no type for {kind:?}")))
}

fn unfit(name: &str, cause: &str) -> CheckpointError {
    CheckpointError::Tensor { name: name.to_owned(), cause: cause.to_owned() }
}

/// Counts and hashes what passes through.
struct Hashed<F> {
    inner: F,
    hasher: crc32fast::Hasher,
    bytes: u64,
}

impl<F> Hashed<F> {
    fn pass(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        self.bytes += piece.len() as u64;
    }

    fn entry(self) -> FileEntry {
        FileEntry { bytes: self.bytes, crc32: hex(self.hasher.finalize()) }
    }
}

impl Hashed<File> {
    /// Reads what is left, and compares the checksum.
    fn finish(mut self, name: &str, entry: &FileEntry) -> Result<(), Refusal> {
        io::copy(&mut self, &mut io::sink()).map_err(Refusal::unreadable(name))?;
        let found = self.entry().crc32;
        if found == entry.crc32 {
            return Ok(());
        }
        let what = format!("its checksum is {found}, that written is {}", entry.crc32);
        Err(Refusal::damaged(name, what))
    }
}

impl<F: Write> Write for Hashed<F> {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        let len = self.inner.write(piece)?;
        self.pass(&piece[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<F: Read> Read for Hashed<F> {
    fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(piece)?;
        self.pass(&piece[..len]);
        Ok(len)
    }
}
