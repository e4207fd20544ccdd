//! The one reader and writer of safetensors files.
//!
//! ```text
//!   8 bytes: length of the header │ header (JSON) │ bytes of the tensors, one after another
//!
//!   header: "__metadata__": { "format": "pt", "DCP_VERSION": "1.0",
//!                             "DCP_SHARDING_INFO": "{fc.weight: {saved_offsets: […]}, …}" }
//!           "fc.weight":    { "dtype": "F32", "shape": […], "data_offsets": [begin, end] }
//! ```
//! `DCP_SHARDING_INFO` gives the offsets of a file's part in the global tensor. PyTorch's distributed checkpoints write
//! it into Hugging Face files (`HuggingFaceStorageWriter`); other programs ignore it. A file has at most one part of a
//! tensor.
//!
//! The checksum is computed while a file is written or read, so each byte is touched once. Tensors that are not
//! contiguous, or on a GPU, are copied one at a time. Wide elements come first, so that all are aligned. The same
//! tensors give the same bytes.

mod dtype;
mod header;
mod writing;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use ::safetensors::SafeTensorError;
use ::safetensors::tensor::Dtype;
use drumline_torch::{Named, TorchError, bytes_mut};
use tch::{Device, Kind, Tensor};

use dtype::kind_of;
pub(super) use dtype::{dtype_of, empty, size_of};
pub(super) use header::{Entry, Header};
use writing::replace_parts;
pub(super) use writing::{Made, Part, Written, replace_made, write_made, write_parts};

/// Bytes that are hashed and copied together: few calls, and still in the cache for the second of the two.
pub(super) const PIECE: usize = 1 << 20;

/// Why a file of tensors cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The length of the header is impossible.
    #[error("its header claims {claimed} bytes")]
    HeaderLength {
        /// The length in the first eight bytes.
        claimed: u64,
    },
    /// The header is malformed.
    #[error("its header: {0}")]
    Header(#[from] SafeTensorError),
    /// The header does not match the length of the file.
    #[error("its header claims {claimed} bytes of tensors, there are {found}")]
    DataLength {
        /// The length according to the header.
        claimed: u64,
        /// The real length.
        found: u64,
    },
    /// The offsets of a part are missing, or have the wrong number of dims.
    #[error("its header does not say where `{name}`, of shape {shape:?}, begins in the global tensor")]
    Offsets {
        /// The tensor.
        name: String,
        /// The part's shape.
        shape: Vec<usize>,
    },
    /// The file has only a part of a tensor.
    #[error(
        "it has a part of tensor `{name}`, from {offsets:?} on, and not the whole; try the folder with all parts"
    )]
    PartOnly {
        /// The tensor.
        name: String,
        /// Where the part begins.
        offsets: Vec<usize>,
    },
    /// libtorch has no such element type.
    #[error("tensor `{name}` is of type {dtype}, which libtorch does not have")]
    NoKind {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: Dtype,
    },
    /// A tensor cannot be saved.
    #[error("cannot save tensor `{name}`: {cause}")]
    Unsavable {
        /// The tensor.
        name: String,
        /// Why not.
        cause: String,
    },
    /// There is no memory for a tensor.
    #[error(transparent)]
    Memory(#[from] TorchError),
}

impl SafetensorsError {
    /// Whether the file is not a valid safetensors file.
    pub fn is_malformed(&self) -> bool {
        matches!(
            self,
            Self::HeaderLength { .. } | Self::Header(_) | Self::DataLength { .. } | Self::Offsets { .. }
        ) || matches!(self, Self::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof)
    }
}

/// Reads all tensors of a file, which must have them completely.
///
/// ```
/// use drumline::checkpoint::safetensors;
/// use drumline::optim::Named;
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("model.safetensors");
/// let weight = Named { name: "fc.weight".into(), tensor: tch::Tensor::from_slice(&[1f32, 2.0]) };
/// safetensors::write(&file, &[weight])?;
/// assert_eq!(safetensors::read(&file)?["fc.weight"], tch::Tensor::from_slice(&[1f32, 2.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, SafetensorsError> {
    let mut file = File::open(path)?;
    let header = Header::read(&mut file)?;
    let mut tensors = BTreeMap::new();
    for Entry { name, dtype, shape, offsets, .. } in header.entries {
        if offsets.iter().any(|offset| *offset > 0) {
            return Err(SafetensorsError::PartOnly { name, offsets });
        }
        let mut tensor = empty(&name, dtype, &shape)?;
        file.read_exact(bytes_mut(&mut tensor)?)?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// All tensors of a file, which must have them completely. Their bytes stay in the file, and are read when they are used:
/// the file must not be changed while the tensors live. A change of a tensor stays in this process.
pub fn map(path: &Path) -> Result<BTreeMap<String, Tensor>, SafetensorsError> {
    let header = Header::read(&mut File::open(path)?)?;
    if header.entries.is_empty() {
        return Ok(BTreeMap::new());
    }
    let bytes = map_bytes(path)?;
    header.entries.into_iter().map(|entry| Ok((entry.name.clone(), mapped(&bytes, entry)?))).collect()
}

/// All bytes of a file, mapped as [`map`] does it.
pub(super) fn map_bytes(path: &Path) -> Result<Tensor, SafetensorsError> {
    let len = std::fs::metadata(path)?.len();
    let Some(text) = path.to_str() else {
        return Ok(Tensor::from_slice(&std::fs::read(path)?));
    };
    let bytes = Tensor::f_from_file(text, false, len as i64, (Kind::Uint8, Device::Cpu));
    Ok(bytes.map_err(TorchError::from)?)
}

/// A tensor whose bytes are in these.
fn mapped(file: &Tensor, entry: Entry) -> Result<Tensor, SafetensorsError> {
    let Entry { name, dtype, shape, offsets, bytes } = entry;
    if offsets.iter().any(|offset| *offset > 0) {
        return Err(SafetensorsError::PartOnly { name, offsets });
    }
    let kind = kind_of(&name, dtype)?;
    let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    let elements = elements(file, bytes, kind)?;
    Ok(elements.f_view(&shape[..]).map_err(TorchError::from)?)
}

/// Bytes of a file as elements of this kind.
pub(super) fn elements(file: &Tensor, bytes: Range<u64>, kind: Kind) -> Result<Tensor, TorchError> {
    let own = file.f_narrow(0, bytes.start as i64, (bytes.end - bytes.start) as i64)?;
    // libtorch wants elements at multiples of their size.
    let is_aligned = bytes.start.is_multiple_of(kind.elt_size_in_bytes() as u64);
    let own = if is_aligned { own } else { own.copy() };
    Ok(own.f_view_dtype(kind)?)
}

/// Writes complete tensors to a file. The file replaces the one at `path` when it is complete.
pub fn write(path: &Path, tensors: &[Named]) -> Result<(), SafetensorsError> {
    let parts: Vec<Part<'_>> = tensors.iter().map(Part::whole).collect();
    replace_parts(path, &parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, tensor: Tensor) -> Named {
        Named { name: name.into(), tensor }
    }

    #[test]
    fn mapped_tensors_are_those_that_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let whole = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]);
        let tensors = [
            named("weight", whole.shallow_clone()),
            named("half", whole.to_kind(Kind::BFloat16)),
            named("flags", whole.gt(3.0)),
            named("count", Tensor::from(7i64)),
            named("empty", Tensor::zeros([0, 5], (Kind::Float, Device::Cpu))),
        ];
        write(&file, &tensors).unwrap();
        let (read, mapped) = (read(&file).unwrap(), map(&file).unwrap());
        assert_eq!(read.len(), tensors.len());
        for (name, tensor) in &read {
            assert_eq!((mapped[name].kind(), mapped[name].size()), (tensor.kind(), tensor.size()), "{name}");
            assert!(mapped[name].equal(tensor), "{name}");
        }
        let _ = mapped["weight"].shallow_clone().fill_(5.0);
        assert!(map(&file).unwrap()["weight"].equal(&whole), "a change stays in this process");
    }

    #[test]
    fn elements_may_lie_at_any_byte_and_none_need_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("odd.safetensors");
        let mut header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.to_owned();
        header += if header.len().is_multiple_of(2) { " " } else { "" };
        let values: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &values].concat();
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(map(&file).unwrap()["a"], Tensor::from_slice(&[1.5f32, -2.0]));
        write(&file, &[]).unwrap();
        assert!(map(&file).unwrap().is_empty());
        std::fs::write(&file, b"cut").unwrap();
        assert!(map(&file).unwrap_err().is_malformed());
    }
}
