//! Objects of any type: written as MessagePack, sent as bytes. Data is never code, whatever the bytes are.
//!
//! ```text
//!   object ─▶ [ type's name, object with field names ] ─▶ lengths to all ─▶ bytes to the ranks that need them ─▶ object
//! ```
//! The format is self-describing, so untagged enums, flattened structs, options, NaN and infinities survive. The name of the
//! type is sent for the error of a rank that expects another type. All ranks make the same calls whether or not an object
//! can be written and read, so the group can still be used after such an error.

use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::ProcessGroup;
use crate::error::CommError;
use crate::slices::total;

/// Sent instead of a length if the object could not be written.
const UNWRITTEN: u64 = u64::MAX;

/// The longest object: lengths inside an object have 32 bits.
const LONGEST: usize = u32::MAX as usize;

/// Objects: anything that serde can write, up to 4 GiB each. The receivers need not know the length.
///
/// An object that cannot be written or read is [`CommError::Object`], after which the group can still be used. Large
/// arrays travel faster as buffers; bytes are compact with `#[serde(with = "serde_bytes")]`.
impl ProcessGroup {
    /// Copies the root's object to all ranks. Only the root passes an object.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        root: usize,
    ) -> Result<T, CommError> {
        self.check_root(root)?;
        let written = match object {
            Some(object) if self.rank() == root => encode(object),
            None if self.rank() == root => {
                return Err(CommError::invalid(format!(
                    "rank {root} is the root and must give the object; try Some(..)"
                )));
            }
            _ => Ok(Vec::new()),
        };
        let mut len = [announced(&written)];
        self.broadcast(&mut len, root)?;
        let mut data = written?;
        self.enlarge(&mut data, self.length_from(root, len[0])?)?;
        self.broadcast(&mut data, root)?;
        self.decode(root, &data)
    }

    /// Returns every rank's object, in rank order, on all ranks.
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
    ) -> Result<Vec<T>, CommError> {
        let (data, counts) = self.encode_all(object)?;
        let mut all = self.room_for(&counts)?;
        self.all_gather_uneven(&data, &mut all, &counts)?;
        self.decode_all(&all, &counts)
    }

    /// Returns every rank's object, in rank order, on the root; `None` on the other ranks.
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
        let mut all = self.room_for(&counts)?;
        self.gather_uneven(&data, Some(&mut all), &counts, root)?;
        self.decode_all(&all, &counts).map(Some)
    }

    /// Returns the `i`-th of the root's objects on rank `i`. Only the root passes objects.
    #[track_caller]
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<&[T]>,
        root: usize,
    ) -> Result<T, CommError> {
        self.check_root(root)?;
        let is_root = self.rank() == root;
        let written: Result<Vec<Vec<u8>>, CommError> = match objects {
            Some(objects) if is_root && objects.len() == self.size() => objects.iter().map(encode).collect(),
            _ if is_root => {
                let got = objects.map_or(0, <[T]>::len);
                return Err(CommError::invalid(format!(
                    "the root must give {} objects, got {got}",
                    self.size()
                )));
            }
            _ => Ok(vec![Vec::new(); self.size()]),
        };
        let lens = match &written {
            Ok(written) => written.iter().map(|data| data.len() as u64).collect(),
            Err(_) => vec![UNWRITTEN; self.size()],
        };
        let mut len = [0u64];
        self.scatter(is_root.then_some(&lens[..]), &mut len, root)?;
        let written = written?;
        // The lengths differ, and only the root sends.
        let sends: Vec<usize> = written.iter().map(Vec::len).collect();
        let mut receives = vec![0; self.size()];
        receives[root] = self.length_from(root, len[0])?;
        let mut mine = self.room_for(&receives)?;
        self.all_to_all_uneven(&written.concat(), &sends, &mut mine, &receives)?;
        self.decode(root, &mine)
    }

    /// This rank's object as bytes, and the lengths of all ranks' objects.
    #[track_caller]
    fn encode_all<T: Serialize>(&self, object: &T) -> Result<(Vec<u8>, Vec<usize>), CommError> {
        let written = encode(object);
        let mut lens = vec![0u64; self.size()];
        self.all_gather(&[announced(&written)], &mut lens)?;
        let lens = lens.into_iter().enumerate().map(|(rank, len)| self.length_from(rank, len));
        Ok((written?, lens.collect::<Result<_, _>>()?))
    }

    /// The length that a rank has announced.
    fn length_from(&self, rank: usize, len: u64) -> Result<usize, CommError> {
        let rank = self.members()[rank];
        match usize::try_from(len) {
            Ok(len) if len <= LONGEST => Ok(len),
            _ if len == UNWRITTEN => Err(unwritten(format!("rank {rank} could not write its object"))),
            _ => Err(unreadable(format!("rank {rank} announced {len} bytes, the longest is {LONGEST}"))),
        }
    }

    fn room_for(&self, counts: &[usize]) -> Result<Vec<u8>, CommError> {
        let len = total(counts.iter().copied(), 1)
            .ok_or_else(|| unreadable("all objects together are longer than memory can hold".into()))?;
        let mut room = Vec::new();
        self.enlarge(&mut room, len)?;
        Ok(room)
    }

    /// Makes `data` this long. The other ranks send next, so a rank without the memory must end the group.
    fn enlarge(&self, data: &mut Vec<u8>, len: usize) -> Result<(), CommError> {
        data.try_reserve_exact(len - data.len()).map_err(|error| {
            let group = self.name().into();
            let cause = format!("{len} bytes: {error}");
            self.call_off(CommError::System { group, what: "allocating memory for objects", cause })
        })?;
        data.resize(len, 0);
        Ok(())
    }

    /// The object that `rank` has sent.
    fn decode<T: DeserializeOwned>(&self, rank: usize, data: &[u8]) -> Result<T, CommError> {
        rmp_serde::from_slice(data).map(|(_, object): (IgnoredAny, T)| object).map_err(|error| {
            let (rank, wanted) = (self.members()[rank], std::any::type_name::<T>());
            let sent = match rmp_serde::from_slice::<(&str, IgnoredAny)>(data) {
                Ok((name, _)) => format!("a `{name}`"),
                Err(_) => format!("{} bytes that are no object", data.len()),
            };
            unreadable(format!("rank {rank} sent {sent}, this rank reads a `{wanted}`: {error}"))
        })
    }

    fn decode_all<T: DeserializeOwned>(&self, all: &[u8], counts: &[usize]) -> Result<Vec<T>, CommError> {
        let mut rest = all;
        let cells = counts.iter().map(|&count| {
            let (cell, after) = rest.split_at(count);
            rest = after;
            cell
        });
        cells.enumerate().map(|(rank, cell)| self.decode(rank, cell)).collect()
    }
}

fn encode<T: Serialize>(object: &T) -> Result<Vec<u8>, CommError> {
    let name = std::any::type_name::<T>();
    let data = rmp_serde::to_vec_named(&(name, object))
        .map_err(|error| unwritten(format!("a `{name}`: {error}")))?;
    if data.len() > LONGEST {
        let what = format!("a `{name}` of {} bytes, the longest is {LONGEST}; try a buffer", data.len());
        return Err(unwritten(what));
    }
    Ok(data)
}

/// The length that is sent to the others.
fn announced(written: &Result<Vec<u8>, CommError>) -> u64 {
    written.as_ref().map_or(UNWRITTEN, |data| data.len() as u64)
}

fn unwritten(cause: String) -> CommError {
    CommError::Object { what: "writing", cause }
}

fn unreadable(cause: String) -> CommError {
    CommError::Object { what: "reading", cause }
}
