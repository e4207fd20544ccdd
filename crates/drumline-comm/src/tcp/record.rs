//! Records: the data of a protected link in pieces, each with its length and a tag that proves its origin and its position.
//!
//! ```text
//!   length 4, its complement 4 | data, at most 64 KiB | tag 32          mac: plain data
//!   length 4, its complement 4 | data, at most 64 KiB | tag 16          aead: encrypted data
//! ```
//! The n-th record of a direction is sealed with the number n and that direction's key. So a record that is changed, repeated,
//! left out, moved or taken from another link does not verify. A length is verified only when all of the record has
//! arrived; its complement shows a changed length at once, where a reader would otherwise wait for bytes that never come.
//! `mac` is the keyed hash of BLAKE3 over the number and the record, `aead` is AES-256-GCM with the number as its nonce. On a
//! CPU with AES instructions, encrypting is the faster of the two. Not here: where keys come from (the handshake), how bytes
//! move (`pipe`).

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use super::security::LinkSecurity;

/// The most data in one record.
pub(super) const MAX_DATA: usize = 64 << 10;

/// Bytes of the length that precedes data, and of its complement.
const LENGTH: usize = 8;

/// Bytes of the longest tag that follows it.
const MAX_TAG: usize = 32;

/// The longest record.
pub(super) const MAX_RECORD: usize = LENGTH + MAX_DATA + MAX_TAG;

/// Size of the read buffer.
const READ_AHEAD: usize = 4 * MAX_RECORD;

/// Why a record is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadRecord {
    /// It was changed, or it is not the next one.
    #[error(
        "record {number} does not prove its origin: it was changed, repeated, left out or moved on its way; try finding out \
         who sits between the two hosts"
    )]
    Tag {
        /// Its number in the stream.
        number: u64,
    },
    /// No record has that length.
    #[error(
        "record {number} begins with {begin:02x?}, which is no length of a record: it was changed on its way; try finding out \
         who sits between the two hosts"
    )]
    Length {
        /// Its number in the stream.
        number: u64,
        /// Its first bytes.
        begin: [u8; LENGTH],
    },
}

fn encode_length(len: usize) -> [u8; LENGTH] {
    let len = len as u64 & 0xffff_ffff;
    (len | !len << 32).to_le_bytes()
}

fn decode_length(bytes: [u8; LENGTH]) -> Option<usize> {
    let len = u64::from_le_bytes(bytes) as u32 as usize;
    ((1..=MAX_DATA).contains(&len) && encode_length(len) == bytes).then_some(len)
}

/// One direction's key.
enum Key {
    Mac([u8; 32]),
    Aead(Box<LessSafeKey>),
}

impl Key {
    fn new(security: LinkSecurity, key: &[u8; 32]) -> Self {
        if security != LinkSecurity::Aead {
            return Self::Mac(*key);
        }
        let key = UnboundKey::new(&AES_256_GCM, key).expect("AES-256 has keys of 32 bytes");
        Self::Aead(Box::new(LessSafeKey::new(key)))
    }

    fn tag_len(&self) -> usize {
        match self {
            Self::Mac(_) => blake3::OUT_LEN,
            Self::Aead(_) => AES_256_GCM.tag_len(),
        }
    }

    /// Adds the tag to a record of length and data.
    fn seal(&self, number: u64, record: &mut Vec<u8>) {
        match self {
            Self::Mac(key) => {
                let tag = mac(key, number, record);
                record.extend_from_slice(tag.as_bytes());
            }
            Self::Aead(key) => {
                let (length, data) = record.split_at_mut(LENGTH);
                let tag = key.seal_in_place_separate_tag(nonce(number), Aad::from(&*length), data);
                let tag = tag.expect("a record is far shorter than AES-GCM's limit");
                record.extend_from_slice(tag.as_ref());
            }
        }
    }

    /// Whether the tag at the record's end is right. If so, its data is decrypted.
    fn open(&self, number: u64, record: &mut [u8]) -> bool {
        match self {
            Self::Mac(key) => {
                let (record, tag) = record.split_at(record.len() - blake3::OUT_LEN);
                // Hashes are compared in constant time.
                tag.try_into().is_ok_and(|tag: [u8; blake3::OUT_LEN]| mac(key, number, record) == tag)
            }
            Self::Aead(key) => {
                let (length, sealed) = record.split_at_mut(LENGTH);
                key.open_in_place(nonce(number), Aad::from(&*length), sealed).is_ok()
            }
        }
    }
}

fn mac(key: &[u8; 32], number: u64, record: &[u8]) -> blake3::Hash {
    blake3::Hasher::new_keyed(key).update(record).update(&number.to_le_bytes()).finalize()
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Makes the records of one direction.
pub(super) struct Sealer {
    key: Key,
    /// The number of the next record.
    next: u64,
    record: Vec<u8>,
}

impl Sealer {
    pub(super) fn new(security: LinkSecurity, key: &[u8; 32]) -> Self {
        Self { key: Key::new(security, key), next: 0, record: Vec::with_capacity(MAX_RECORD) }
    }

    /// The next record, with as much of the two slices as it can hold; and how much that is.
    pub(super) fn seal(&mut self, pieces: [&[u8]; 2]) -> (&[u8], usize) {
        self.record.clear();
        self.record.extend_from_slice(&[0; LENGTH]);
        for piece in pieces {
            let room = LENGTH + MAX_DATA - self.record.len();
            self.record.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        let len = self.record.len() - LENGTH;
        self.record[..LENGTH].copy_from_slice(&encode_length(len));
        self.key.seal(self.next, &mut self.record);
        self.next += 1;
        (&self.record, len)
    }
}

/// Reads the records of one direction: bytes are added as they arrive, data comes out once it is verified.
pub(super) struct Opener {
    key: Key,
    /// The number of the next record.
    next: u64,
    buffer: Box<[u8]>,
    /// What has been read and not been verified: `buffer[begin..end]`.
    begin: usize,
    end: usize,
    /// Verified data that has not been consumed: `buffer[data.0..data.1]`.
    data: (usize, usize),
}

impl Opener {
    pub(super) fn new(security: LinkSecurity, key: &[u8; 32]) -> Self {
        let buffer = vec![0; READ_AHEAD].into_boxed_slice();
        Self { key: Key::new(security, key), next: 0, buffer, begin: 0, end: 0, data: (0, 0) }
    }

    /// Verified data that has not been consumed.
    pub(super) fn data(&self) -> &[u8] {
        &self.buffer[self.data.0..self.data.1]
    }

    /// Consumes `len` bytes of the data.
    pub(super) fn take(&mut self, len: usize) {
        self.data.0 += len;
    }

    /// Room for arriving bytes; to be called when there is no data and no complete record.
    pub(super) fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end, self.data) = (0, self.end - self.begin, (0, 0));
        &mut self.buffer[self.end..]
    }

    /// Adds `len` bytes that were read into the room.
    pub(super) fn fill(&mut self, len: usize) {
        self.end += len;
    }

    /// Verifies the next record, if all of it has arrived; returns whether there is data now.
    pub(super) fn open(&mut self) -> Result<bool, BadRecord> {
        let (number, tag_len) = (self.next, self.key.tag_len());
        let Some((length, rest)) = self.buffer[self.begin..self.end].split_first_chunk::<LENGTH>() else {
            return Ok(false);
        };
        let len = decode_length(*length).ok_or(BadRecord::Length { number, begin: *length })?;
        if rest.len() < len + tag_len {
            return Ok(false);
        }
        if !self.key.open(number, &mut self.buffer[self.begin..][..LENGTH + len + tag_len]) {
            return Err(BadRecord::Tag { number });
        }
        self.next += 1;
        self.data = (self.begin + LENGTH, self.begin + LENGTH + len);
        self.begin += LENGTH + len + tag_len;
        Ok(true)
    }
}

/// Whether any record comes out of these bytes, with a key that their maker cannot know.
#[cfg(fuzzing)]
pub(crate) fn opens_any<'b>(security: LinkSecurity, pieces: impl Iterator<Item = &'b [u8]>) -> bool {
    let mut key = [0; 32];
    getrandom::fill(&mut key).expect("the system has random bytes");
    let mut opener = Opener::new(security, &key);
    for piece in pieces {
        let room = opener.room();
        let len = piece.len().min(room.len());
        room[..len].copy_from_slice(&piece[..len]);
        opener.fill(len);
        match opener.open() {
            Ok(false) => {}
            Ok(true) => return true,
            Err(_) => return false,
        }
    }
    false
}

/// Keys do not appear in logs.
impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealer(record {})", self.next)
    }
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opener(record {})", self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: [u8; 32] = [7; 32];

    fn modes() -> [LinkSecurity; 2] {
        [LinkSecurity::Mac, LinkSecurity::Aead]
    }

    fn seal_all(sealer: &mut Sealer, mut data: &[u8]) -> Vec<u8> {
        let mut sent = Vec::new();
        while !data.is_empty() {
            let (head, tail) = data.split_at(data.len() / 3);
            let (record, len) = sealer.seal([head, tail]);
            sent.extend_from_slice(record);
            data = &data[len..];
        }
        sent
    }

    /// What comes out when `sent` goes in, in pieces of these sizes.
    fn open_all(
        opener: &mut Opener,
        mut sent: &[u8],
        mut pieces: impl Iterator<Item = usize>,
    ) -> Result<Vec<u8>, BadRecord> {
        let mut got = Vec::new();
        loop {
            if opener.open()? {
                got.extend_from_slice(opener.data());
                opener.take(opener.data().len());
            } else if sent.is_empty() {
                return Ok(got);
            } else {
                let room = opener.room();
                let len = pieces.next().unwrap_or(usize::MAX).min(room.len()).min(sent.len());
                room[..len].copy_from_slice(&sent[..len]);
                opener.fill(len);
                sent = &sent[len..];
            }
        }
    }

    proptest! {
        #[test]
        fn data_survives_a_round_trip(
            len in 0usize..300_000,
            pieces in prop::collection::vec(1usize..100_000, 0..20),
        ) {
            let data: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8).collect();
            for mode in modes() {
                let sent = seal_all(&mut Sealer::new(mode, &KEY), &data);
                let got = open_all(&mut Opener::new(mode, &KEY), &sent, pieces.iter().copied());
                prop_assert!(got.unwrap() == data);
            }
        }

        #[test]
        fn every_changed_bit_is_noticed(bit in 0usize..8 * (3 * (LENGTH + 16) + 300)) {
            for mode in modes() {
                let mut sealer = Sealer::new(mode, &KEY);
                let mut sent: Vec<u8> = (0..3).flat_map(|_| seal_all(&mut sealer, &[5; 100])).collect();
                sent[bit / 8] ^= 1 << (bit % 8);
                let mut opener = Opener::new(mode, &KEY);
                prop_assert!(open_all(&mut opener, &sent, std::iter::empty()).is_err());
            }
        }
    }

    #[test]
    fn records_that_are_repeated_left_out_swapped_or_of_another_link_are_refused() {
        for mode in modes() {
            let mut sealer = Sealer::new(mode, &KEY);
            let records: Vec<_> = (0..3).map(|byte| seal_all(&mut sealer, &[byte; 50])).collect();
            let foreign = seal_all(&mut Sealer::new(mode, &[8; 32]), &[0; 50]);
            let open =
                |order: &[&[u8]]| open_all(&mut Opener::new(mode, &KEY), &order.concat(), std::iter::empty());
            let [a, b, c] = &records[..] else { panic!() };
            assert_eq!(open(&[a, b, c]).unwrap().len(), 150, "control");
            assert_eq!(open(&[a, a]), Err(BadRecord::Tag { number: 1 }), "repeated");
            assert_eq!(open(&[a, c]), Err(BadRecord::Tag { number: 1 }), "left out");
            assert_eq!(open(&[b, a]), Err(BadRecord::Tag { number: 0 }), "swapped");
            assert_eq!(open(&[&foreign]), Err(BadRecord::Tag { number: 0 }), "of another link");
        }
        let mut encrypting = Sealer::new(LinkSecurity::Aead, &KEY);
        let other = [seal_all(&mut encrypting, &[0; 50]), seal_all(&mut encrypting, &[0; 50])].concat();
        let opened = open_all(&mut Opener::new(LinkSecurity::Mac, &KEY), &other, std::iter::empty());
        assert!(opened.is_err(), "of another mode");
    }

    #[test]
    fn encrypted_data_cannot_be_read_and_authenticated_data_can() {
        let contains = |mode| {
            let sent = seal_all(&mut Sealer::new(mode, &KEY), b"a secret gradient");
            sent.windows(8).any(|window| window == b"gradient")
        };
        assert!(!contains(LinkSecurity::Aead) && contains(LinkSecurity::Mac));
    }
}
