//! A file of `torch.save`: its pickle, and where the bytes of its tensors are.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{TorchFileError, ZipError};
use crate::torch::TensorInfo;
use crate::value::{Pickle, Value};
use crate::zip::{self, Entry};

const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

/// The longest pickle that is read from a file.
const LONGEST_PICKLE: u64 = 256 << 20;

/// A file that was opened. Only its pickle is in memory.
#[derive(Debug)]
pub struct TorchFile {
    path: PathBuf,
    file: File,
    pickle: Pickle,
    /// The entries with elements, by the keys of their storages.
    storages: HashMap<String, Entry>,
}

impl TorchFile {
    /// Opens a file and reads its pickle, whose checksum is checked.
    pub fn open(path: &Path) -> Result<Self, TorchFileError> {
        let file = File::open(path).map_err(TorchFileError::io(path))?;
        let (pickle, storages) = parts(&file).map_err(TorchFileError::zip(path))?;
        let pickle = Pickle::read(pickle);
        let pickle = pickle.map_err(|source| TorchFileError::Pickle { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file, pickle, storages })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The saved object.
    pub fn root(&self) -> Value<'_> {
        self.pickle.root()
    }

    /// The bytes of the file from the tensor's first element to its last.
    pub fn bytes_of(&self, tensor: &TensorInfo) -> Result<Range<u64>, TorchFileError> {
        let entry = self.entry(tensor)?;
        let (found, claimed) = (entry.bytes.end - entry.bytes.start, tensor.storage.num_bytes);
        if found != claimed {
            return Err(self.of_storage(tensor, format!("has {found} bytes, expected {claimed}")));
        }
        let start = entry.bytes.start + tensor.first * tensor.dtype.size();
        Ok(start..start + tensor.span() * tensor.dtype.size())
    }

    /// Reads the storage of a tensor once, and compares its checksum.
    pub fn check(&self, tensor: &TensorInfo) -> Result<(), TorchFileError> {
        self.entry(tensor)?.check(&self.file).map_err(TorchFileError::zip(&self.path))
    }

    fn entry(&self, tensor: &TensorInfo) -> Result<&Entry, TorchFileError> {
        let entry = self.storages.get(&tensor.storage.key);
        entry.ok_or_else(|| self.of_storage(tensor, "is missing".into()))
    }

    fn of_storage(&self, tensor: &TensorInfo, what: String) -> TorchFileError {
        TorchFileError::Storage { path: self.path.clone(), key: tensor.storage.key.clone(), what }
    }
}

/// The bytes of the pickle, and the entries with elements.
fn parts(file: &File) -> Result<(Vec<u8>, HashMap<String, Entry>), ZipError> {
    let entries = zip::entries(file)?;
    let is_pickle = |entry: &&Entry| entry.name.rsplit('/').next() == Some(PICKLE);
    let pickle = entries.iter().find(is_pickle).ok_or(ZipError::Missing { name: PICKLE })?;
    let folder = pickle.name.strip_suffix(PICKLE).unwrap_or_default().to_owned();
    if let Some(entry) = entries.iter().find(|entry| entry.name.strip_prefix(&folder) == Some(BYTE_ORDER)) {
        let order = entry.read(file, 64)?;
        if order.trim_ascii() != b"little" {
            return Err(ZipError::ByteOrder { order: String::from_utf8_lossy(&order).into_owned() });
        }
    }
    let bytes = pickle.read(file, LONGEST_PICKLE)?;
    let of_storage = |entry: Entry| {
        let key = entry.name.strip_prefix(&folder)?.strip_prefix("data/")?.to_owned();
        Some((key, entry))
    };
    Ok((bytes, entries.into_iter().filter_map(of_storage).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;
    use crate::zip::archive::{Field, archive};

    /// torch.save({"w": torch.tensor([[1., 2.], [3., 4.]])}), without its other entries.
    const PICKLE_OF_W: &[u8] = b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storage\
        ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00K\x02K\x02\x86K\x02K\x01\x86\x89\
        ccollections\nOrderedDict\n)RtRs.";

    fn elements() -> Vec<u8> {
        [1f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn opened(bytes: &[u8]) -> Result<TorchFile, TorchFileError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.pt");
        std::fs::write(&path, bytes).unwrap();
        TorchFile::open(&path)
    }

    fn refused(bytes: &[u8]) -> String {
        opened(bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_tensor_is_found() {
        for field in [Field::Short, Field::Zip64] {
            let elements = elements();
            let bytes = archive(
                &[("w/data.pkl", PICKLE_OF_W), ("w/byteorder", b"little"), ("w/data/0", &elements)],
                field,
            );
            let file = opened(&bytes).unwrap();
            let tensor = file.root().get("w").unwrap().tensor().unwrap();
            assert_eq!((tensor.dtype, &tensor.shape[..]), (Dtype::Float32, &[2, 2][..]));
            let range = file.bytes_of(tensor).unwrap();
            assert_eq!(&bytes[range.start as usize..range.end as usize], elements);
            file.check(tensor).unwrap();
        }
    }

    #[test]
    fn files_of_deepspeed_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden/deepspeed");
        let model = folder.join("stage2_groups/stage2_groups/mp_rank_00_model_states.pt");
        let file = TorchFile::open(&model).unwrap();
        let weight = file.root().get("module").unwrap().get("hidden.weight").unwrap().tensor().unwrap();
        assert_eq!((weight.dtype, &weight.shape[..]), (Dtype::Float32, &[5, 6][..]));
        let bytes = file.bytes_of(weight).unwrap();
        assert_eq!(bytes.end - bytes.start, 120);
        file.check(weight).unwrap();
        assert_eq!(file.root().get("note").unwrap().as_text(), Some("stage2_groups"), "the client's state");
        let optimizer = folder.join("stage2_groups/stage2_groups/zero_pp_rank_0_mp_rank_00_optim_states.pt");
        let file = TorchFile::open(&optimizer).unwrap();
        let state = file.root().get("optimizer_state_dict").unwrap();
        let stage = state.get("zero_stage").unwrap();
        assert_eq!((stage.as_int(), stage.class().unwrap().1), (Some(2), "ZeroStageEnum"));
        let flat = folder.join("stage3_fp32/stage3_fp32/zero_pp_rank_0_mp_rank_00_optim_states.pt");
        let flat = TorchFile::open(&flat).unwrap();
        let group = flat.root().get("optimizer_state_dict").unwrap().get("fp32_flat_groups").unwrap();
        assert!(group.items().unwrap().next().unwrap().tensor().is_some(), "a tensor with attributes");
        let scaler = state.get("loss_scaler").unwrap();
        assert!(scaler.class().unwrap().0.starts_with("deepspeed."), "{}", scaler.describe());
    }

    #[test]
    fn damage_is_found() {
        let (pickle, elements) = (("w/data.pkl", PICKLE_OF_W), elements());
        let whole = archive(&[pickle, ("w/data/0", &elements)], Field::Short);
        for len in 0..whole.len() {
            assert!(opened(&whole[..len]).is_err(), "cut after {len} bytes");
        }
        let mut changed = whole.clone();
        let at = whole.windows(16).position(|bytes| bytes == elements).unwrap();
        changed[at] ^= 1;
        let file = opened(&changed).unwrap();
        let tensor = file.root().get("w").unwrap().tensor().unwrap();
        let message = file.check(tensor).unwrap_err().to_string();
        assert!(message.contains("`w/data/0` is damaged in it: its checksum is"), "{message}");
        changed[at - elements.len() - 80] ^= 1;
        assert!(opened(&changed).is_err(), "the pickle has a checksum, too");
    }

    #[test]
    fn other_files_are_refused() {
        assert!(
            refused(b"")
                .contains("w.pt: it is not a zip archive, or it is cut short; if a PyTorch before 1.6")
        );
        assert!(refused(&archive(&[("w/other", b"")], Field::Short)).contains("it has no `data.pkl`"));
        let big = archive(&[("w/data.pkl", PICKLE_OF_W), ("w/byteorder", b"big")], Field::Short);
        assert!(refused(&big).contains("`big`-endian"));
        let short =
            opened(&archive(&[("w/data.pkl", PICKLE_OF_W), ("w/data/0", b"1234")], Field::Short)).unwrap();
        let tensor = short.root().get("w").unwrap().tensor().unwrap();
        assert!(
            short.bytes_of(tensor).unwrap_err().to_string().contains("`data/0` has 4 bytes, expected 16")
        );
        let none = opened(&archive(&[("w/data.pkl", PICKLE_OF_W)], Field::Short)).unwrap();
        let message = none.bytes_of(tensor).unwrap_err().to_string();
        assert!(message.contains("`data/0` is missing"), "{message}");
    }
}
