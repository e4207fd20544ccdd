//! The header of a file: the names, types and shapes of its tensors, where their bytes are, and their offsets in the
//! global tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::ops::Range;

use ::safetensors::SafeTensorError;
use ::safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::{SafetensorsError, size_of};

/// The longest header that is read, as in Python's safetensors.
const LONGEST: u64 = 100_000_000;

/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

const METADATA: &str = "__metadata__";
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// A tensor, or its part, in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Entry {
    pub(in super::super) name: String,
    pub(in super::super) dtype: Dtype,
    pub(in super::super) shape: Vec<usize>,
    /// Its offsets in the global tensor.
    pub(in super::super) offsets: Vec<usize>,
    /// Its bytes in the file.
    pub(in super::super) bytes: Range<u64>,
}

/// The offsets of one part, as written in a header.
#[derive(Serialize, Deserialize)]
struct SavedOffsets {
    saved_offsets: Vec<usize>,
}

/// The tensors of a file, in the order of their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Header {
    pub(in super::super) entries: Vec<Entry>,
    /// The number of bytes before the first tensor.
    pub(in super::super) len: u64,
}

impl Header {
    /// Lays out the tensors in a file. Their `bytes` are computed here.
    pub(super) fn new(mut entries: Vec<Entry>) -> Result<Self, SafetensorsError> {
        let mut names = BTreeSet::from([METADATA]);
        if let Some(twice) = entries.iter().find(|entry| !names.insert(entry.name.as_str())) {
            let cause = "there are two of that name".into();
            return Err(SafetensorsError::Unsavable { name: twice.name.clone(), cause });
        }
        entries.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let mut start = 0;
        for entry in &mut entries {
            let end = start + (entry.shape.iter().product::<usize>() * size_of(entry.dtype)) as u64;
            entry.bytes = start..end;
            start = end;
        }
        let len = LENGTH_BYTES + json(&entries).len() as u64;
        for Entry { bytes, .. } in &mut entries {
            *bytes = bytes.start + len..bytes.end + len;
        }
        Ok(Self { entries, len })
    }

    /// The bytes of the file before the first tensor.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut relative = self.entries.clone();
        for Entry { bytes, .. } in &mut relative {
            *bytes = bytes.start - self.len..bytes.end - self.len;
        }
        let json = json(&relative);
        [&(json.len() as u64).to_le_bytes(), &json[..]].concat()
    }

    /// Reads the header of a file. The file must be at its beginning, and is then at the first tensor.
    pub(in super::super) fn read(file: &mut File) -> Result<Self, SafetensorsError> {
        let len = file.metadata()?.len();
        let mut claimed = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut claimed)?;
        let claimed = u64::from_le_bytes(claimed);
        if claimed > LONGEST.min(len.saturating_sub(LENGTH_BYTES)) {
            return Err(SafetensorsError::HeaderLength { claimed });
        }
        let mut json = vec![0; claimed as usize];
        file.read_exact(&mut json)?;
        Self::parse(&json, len)
    }

    /// Parses the header of a file of `file_len` bytes.
    fn parse(json: &[u8], file_len: u64) -> Result<Self, SafetensorsError> {
        let metadata: Metadata = serde_json::from_slice(json).map_err(SafeTensorError::from)?;
        let len = LENGTH_BYTES + json.len() as u64;
        let (claimed, found) = (metadata.data_len() as u64, file_len - len);
        if claimed != found {
            return Err(SafetensorsError::DataLength { claimed, found });
        }
        let info = metadata.metadata().as_ref().and_then(|metadata| metadata.get(SHARDING_INFO));
        let info: Option<BTreeMap<String, SavedOffsets>> =
            info.map(|text| serde_json::from_str(text)).transpose().map_err(SafeTensorError::from)?;
        let keys = metadata.offset_keys().into_iter();
        let entries = keys.map(|name| entry(&metadata, name, info.as_ref(), len));
        Ok(Self { entries: entries.collect::<Result<_, _>>()?, len })
    }
}

fn entry(
    metadata: &Metadata,
    name: String,
    info: Option<&BTreeMap<String, SavedOffsets>>,
    header_len: u64,
) -> Result<Entry, SafetensorsError> {
    let TensorInfo { dtype, shape, data_offsets: (begin, end) } =
        metadata.info(&name).expect("the key is the metadata's own");
    let offsets = match info {
        Some(info) => info.get(&name).map(|saved| saved.saved_offsets.clone()),
        None => Some(vec![0; shape.len()]),
    };
    let Some(offsets) = offsets.filter(|offsets| offsets.len() == shape.len()) else {
        return Err(SafetensorsError::Offsets { name, shape: shape.clone() });
    };
    let bytes = header_len + *begin as u64..header_len + *end as u64;
    Ok(Entry { name, dtype: *dtype, shape: shape.clone(), offsets, bytes })
}

/// The header's text, for tensors whose bytes are counted from the end of the header.
fn json(entries: &[Entry]) -> Vec<u8> {
    let mut json = serde_json::to_vec(&Text(entries)).expect("a header has only string keys");
    json.resize(json.len().next_multiple_of(8), b' ');
    json
}

struct Text<'a>(&'a [Entry]);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let saved =
            |entry: &Entry| (entry.name.clone(), SavedOffsets { saved_offsets: entry.offsets.clone() });
        let info: BTreeMap<String, SavedOffsets> = self.0.iter().map(saved).collect();
        let info = serde_json::to_string(&info).expect("offsets have only string keys");
        // Hugging Face's libraries read `format`, PyTorch's the other two.
        let metadata = BTreeMap::from([(SHARDING_INFO, &*info), ("DCP_VERSION", "1.0"), ("format", "pt")]);
        let mut map = serializer.serialize_map(Some(self.0.len() + 1))?;
        map.serialize_entry(METADATA, &metadata)?;
        for Entry { name, dtype, shape, bytes, .. } in self.0 {
            let data_offsets = (bytes.start as usize, bytes.end as usize);
            map.serialize_entry(name, &TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets })?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, dtype: Dtype, shape: &[usize], offsets: &[usize]) -> Entry {
        let (shape, offsets) = (shape.to_vec(), offsets.to_vec());
        Entry { name: name.into(), dtype, shape, offsets, bytes: 0..0 }
    }

    fn header() -> Header {
        let parts = [
            part("b", Dtype::BF16, &[3], &[0]),
            part("a", Dtype::F32, &[2, 3], &[4, 0]),
            part("n", Dtype::I64, &[], &[]),
            part("empty", Dtype::F32, &[0, 3], &[6, 0]),
        ];
        Header::new(parts.to_vec()).unwrap()
    }

    #[test]
    fn it_is_read_as_written_and_has_the_form_of_pytorch() {
        let encoded = header().encode();
        let len = u64::from_le_bytes(encoded[..8].try_into().unwrap());
        assert_eq!((len % 8, len + 8, encoded.len() as u64), (0, header().len, header().len));
        let end = header().entries.last().unwrap().bytes.end;
        assert_eq!(Header::parse(&encoded[8..], end).unwrap(), header());
        assert_eq!(end, header().len + 8 + 24 + 6);
        let json: serde_json::Value = serde_json::from_slice(&encoded[8..]).unwrap();
        let metadata = &json["__metadata__"];
        assert_eq!((&metadata["format"], &metadata["DCP_VERSION"]), (&"pt".into(), &"1.0".into()));
        let info: serde_json::Value =
            serde_json::from_str(metadata["DCP_SHARDING_INFO"].as_str().unwrap()).unwrap();
        assert_eq!(info["a"], serde_json::json!({ "saved_offsets": [4, 0] }));
        assert_eq!(info["n"], serde_json::json!({ "saved_offsets": [] }));
    }

    #[test]
    fn a_header_without_offsets_has_complete_tensors() {
        let json = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let header = Header::parse(json, 8 + json.len() as u64 + 8).unwrap();
        assert_eq!(header.entries[0].offsets, [0]);
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let parse = |metadata: &str, extra: u64| {
            let json = format!(
                r#"{{"__metadata__":{metadata},"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#
            );
            Header::parse(json.as_bytes(), 16 + json.len() as u64 + extra)
                .map(drop)
                .map_err(|error| error.to_string())
        };
        assert_eq!(parse("{}", 0), Ok(()));
        assert_eq!(parse("{}", 1).unwrap_err(), "its header claims 8 bytes of tensors, there are 9");
        for info in ["{}", r#"{\"a\":{\"saved_offsets\":[1,2]}}"#] {
            let error = parse(&format!(r#"{{"DCP_SHARDING_INFO":"{info}"}}"#), 0).unwrap_err();
            assert_eq!(error, "its header does not say where `a`, of shape [2], begins in the global tensor");
        }
        assert!(parse(r#"{"DCP_SHARDING_INFO":"no JSON"}"#, 0).unwrap_err().starts_with("its header: "));
    }
}
