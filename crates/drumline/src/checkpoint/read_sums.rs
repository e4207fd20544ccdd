//! Checksums of pieces that were read, combined into those of whole parts. Pure functions.
//!
//! ```text
//!   a part of a tensor in a file, 20 bytes, its CRC-32 as written: 1a2b3c4d
//!   ├──── rank 0 read 12 bytes ────┼─ rank 1 read 8 ─┤     from the CRC-32s of the two follows that of the 20
//! ```
//! A rank that reads a piece of a part cannot check the checksum of the part. All ranks together can, if each byte was
//! read by one of them. Nobody reads more for it.

use std::collections::BTreeMap;
use std::ops::Range;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};

/// The checksums of everything that one or several ranks have read of a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadSums {
    /// The pieces by file and first byte.
    files: BTreeMap<String, BTreeMap<u64, Piece>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Piece {
    len: u64,
    crc32: u32,
}

impl ReadSums {
    /// Adds a piece of a file. Of two pieces with the same beginning the later one counts.
    pub(super) fn add(&mut self, file: &str, from: Range<u64>, crc32: u32) {
        let piece = Piece { len: from.end - from.start, crc32 };
        if piece.len > 0 {
            self.files.entry(file.to_owned()).or_default().insert(from.start, piece);
        }
    }

    /// Adds what another rank has read.
    pub fn merge(&mut self, other: Self) {
        for (file, pieces) in other.files {
            self.files.entry(file).or_default().extend(pieces);
        }
    }

    /// The checksum of these bytes of a file, if the pieces cover them exactly.
    pub(super) fn of(&self, file: &str, bytes: Range<u64>) -> Option<u32> {
        let (mut sum, mut at) = (Hasher::new(), bytes.start);
        while at < bytes.end {
            let Piece { len, crc32 } = self.files.get(file)?.get(&at)?;
            sum.combine(&Hasher::new_with_initial_len(*crc32, *len));
            at += len;
        }
        (at == bytes.end).then(|| sum.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_of_several_ranks_make_up_the_checksum_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            cuts in proptest::collection::vec(0usize..200, 0..8),
            start in 0u64..1000,
        ) {
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).chain([bytes.len()]).collect();
            ends.sort();
            let mut ranks = [ReadSums::default(), ReadSums::default()];
            let mut from = 0;
            for (turn, end) in ends.iter().enumerate() {
                let range = start + from as u64..start + *end as u64;
                ranks[turn % 2].add("a", range, crc32fast::hash(&bytes[from..*end]));
                from = *end;
            }
            let whole = start..start + bytes.len() as u64;
            let [mut all, other] = ranks;
            let has_all = other == ReadSums::default();
            prop_assert_eq!(all.of("a", whole.clone()).is_some(), has_all || bytes.is_empty());
            all.merge(other);
            prop_assert_eq!(all.of("a", whole.clone()), Some(crc32fast::hash(&bytes)));
            prop_assert_eq!(all.of("b", whole.clone()).is_some(), bytes.is_empty());
            prop_assert_eq!(all.of("a", whole.start..whole.end + 1), None);
        }
    }
}
