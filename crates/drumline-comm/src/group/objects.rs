//! Objects of any size: turned into JSON, sent as bytes. No code travels, whatever the bytes are.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use crate::error::CommError;

/// Objects: anything serde can write. Their length need not be known to the receivers.
impl ProcessGroup {
    /// The root's object, which only the root gives, on all ranks.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        root: usize,
    ) -> Result<T, CommError> {
        self.check_root(root)?;
        let mut data = match object {
            Some(object) if self.rank() == root => encode(object)?,
            None if self.rank() == root => {
                return Err(CommError::invalid(format!(
                    "rank {root} is the root and must give the object; try Some(..)"
                )));
            }
            _ => Vec::new(),
        };
        let mut len = [data.len() as u64];
        self.broadcast(&mut len, root)?;
        data.resize(len[0] as usize, 0);
        self.broadcast(&mut data, root)?;
        decode(&data)
    }

    /// Every rank's object, in rank order, on all ranks.
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
    ) -> Result<Vec<T>, CommError> {
        let (data, counts) = self.encode_all(object)?;
        let mut all = vec![0u8; counts.iter().sum()];
        self.all_gather_uneven(&data, &mut all, &counts)?;
        split(&all, &counts)
    }

    /// Every rank's object, in rank order, on the root; `None` elsewhere.
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, CommError> {
        self.check_root(root)?;
        let (data, counts) = self.encode_all(object)?;
        if self.rank() != root {
            self.gather_uneven(&data, None, &counts, root)?;
            return Ok(None);
        }
        let mut all = vec![0u8; counts.iter().sum()];
        self.gather_uneven(&data, Some(&mut all), &counts, root)?;
        split(&all, &counts).map(Some)
    }

    /// The `i`-th of the root's objects, which only the root gives, on rank `i`.
    #[track_caller]
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T, CommError> {
        self.check_root(root)?;
        let is_root = self.rank() == root;
        let encoded: Vec<Vec<u8>> = match objects {
            Some(objects) if is_root && objects.len() == self.size() => {
                objects.iter().map(encode).collect::<Result<_, _>>()?
            }
            _ if is_root => {
                let got = objects.map_or(0, <[T]>::len);
                return Err(CommError::invalid(format!(
                    "the root must give {} objects, got {got}",
                    self.size()
                )));
            }
            _ => Vec::new(),
        };
        let lens: Vec<u64> = encoded.iter().map(|data| data.len() as u64).collect();
        let mut len = [0u64];
        self.scatter(is_root.then_some(&lens[..]), &mut len, root)?;
        // Each rank gets its own length: only the root sends.
        let mut receives = vec![0; self.size()];
        receives[root] = len[0] as usize;
        let sends: Vec<usize> =
            if is_root { encoded.iter().map(Vec::len).collect() } else { vec![0; self.size()] };
        let mut mine = vec![0u8; len[0] as usize];
        self.all_to_all_uneven(&encoded.concat(), &sends, &mut mine, &receives)?;
        decode(&mine)
    }

    /// This rank's object as bytes, and the length of everybody's.
    #[track_caller]
    fn encode_all<T: Serialize>(&self, object: &T) -> Result<(Vec<u8>, Vec<usize>), CommError> {
        let data = encode(object)?;
        let mut lens = vec![0u64; self.size()];
        self.all_gather(&[data.len() as u64], &mut lens)?;
        Ok((data, lens.into_iter().map(|len| len as usize).collect()))
    }
}

fn encode<T: Serialize>(object: &T) -> Result<Vec<u8>, CommError> {
    serde_json::to_vec(object)
        .map_err(|error| CommError::Object { what: "writing", cause: error.to_string() })
}

fn decode<T: DeserializeOwned>(data: &[u8]) -> Result<T, CommError> {
    serde_json::from_slice(data)
        .map_err(|error| CommError::Object { what: "reading", cause: error.to_string() })
}

fn split<T: DeserializeOwned>(all: &[u8], counts: &[usize]) -> Result<Vec<T>, CommError> {
    let mut rest = all;
    counts
        .iter()
        .map(|&count| {
            let (mine, after) = rest.split_at(count);
            rest = after;
            decode(mine)
        })
        .collect()
}
