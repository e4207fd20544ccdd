//! Records: the data of a protected link in pieces, each with its length and a tag that proves its origin and its position.
//!
//! ```text
//!   length 4, its complement 4 | data, at most 64 KiB | tag 32          mac: plain data
//!   length 4, its complement 4 | data, at most 64 KiB | tag 16          aead: encrypted data
//! ```
//! The n-th record of a direction is sealed with the number n and that direction's key. So a record that is changed, repeated,
//! left out, moved or taken from another link does not verify. A length is verified only when all of the record has
//! arrived; its complement shows a changed length at once, where a reader would otherwise wait for bytes that never come.
//! Both use AEGIS-256X4 (RFC 10032), whose nonce is the record's number and length: `mac` as a MAC over the data, `aead` to
//! encrypt it. On a CPU with AES instructions that takes little longer than a copy of the data, which decides what links cost.
//! Not here: where keys come from (the handshake), how bytes move (`pipe`).

use aegis::aegis256x4::{Aegis256X4, Aegis256X4Mac};

use super::drive::BURST;
use super::security::LinkSecurity;

/// The most data in one record.
pub(super) const MAX_DATA: usize = 64 << 10;

/// Bytes of the length that precedes data, and of its complement.
const LENGTH: usize = 8;

/// Bytes of the tag that follows data.
const MAC_TAG: usize = 32;
const AEAD_TAG: usize = 16;

/// The longest record.
const MAX_RECORD: usize = LENGTH + MAX_DATA + MAC_TAG;

/// Bytes that are copied and authenticated at a time.
const PART: usize = 8 << 10;

/// Bytes of the longest records that are sent at once.
pub(super) const MAX_BURST: usize = BURST / MAX_DATA * MAX_RECORD;

/// Size of the read buffer: a burst, and the rest of a record that has not arrived completely.
const READ_AHEAD: usize = MAX_BURST + MAX_RECORD;

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
struct Key {
    security: LinkSecurity,
    bytes: [u8; 32],
}

impl Key {
    fn tag_len(&self) -> usize {
        if self.security == LinkSecurity::Aead { AEAD_TAG } else { MAC_TAG }
    }

    /// Writes the data of both slices, encrypted if that is this key's purpose, and its tag.
    fn seal(&self, nonce: &[u8; 32], pieces: [&[u8]; 2], data: &mut [u8], tag: &mut [u8]) {
        let (first, second) = data.split_at_mut(pieces[0].len());
        if self.security == LinkSecurity::Aead {
            let mut cipher = Aegis256X4::<AEAD_TAG>::new(&self.bytes, nonce).encryptor(&[]);
            cipher.update(pieces[0], first);
            cipher.update(pieces[1], second);
            tag.copy_from_slice(&cipher.finalize());
        } else {
            let mut mac = self.mac(nonce);
            copy_in_parts(pieces[0], first, |part| mac.update(part));
            copy_in_parts(pieces[1], second, |part| mac.update(part));
            tag.copy_from_slice(&mac.finalize());
        }
    }

    /// Whether the tag is right; if so, the data is in `into`, and if not, zeros are. Tags are compared in constant time.
    fn open(&self, nonce: &[u8; 32], data: &[u8], tag: &[u8], into: &mut [u8]) -> bool {
        if self.security == LinkSecurity::Aead {
            let mut cipher = Aegis256X4::<AEAD_TAG>::new(&self.bytes, nonce).decryptor(&[], into);
            cipher.update(data).is_ok() && tag.try_into().is_ok_and(|tag| cipher.finalize(tag).is_ok())
        } else {
            let mut mac = self.mac(nonce);
            copy_in_parts(data, into, |part| mac.update(part));
            let is_right = tag.try_into().is_ok_and(|tag| mac.verify(tag).is_ok());
            if !is_right {
                into.fill(0);
            }
            is_right
        }
    }

    fn mac(&self, nonce: &[u8; 32]) -> Aegis256X4Mac<MAC_TAG> {
        Aegis256X4Mac::new_with_nonce(&self.bytes, nonce)
    }
}

/// Copies, and calls `seen` with each part of the copy while it is in the CPU's first cache.
fn copy_in_parts(from: &[u8], into: &mut [u8], mut seen: impl FnMut(&[u8])) {
    for (from, into) in from.chunks(PART).zip(into.chunks_mut(PART)) {
        into.copy_from_slice(from);
        seen(into);
    }
}

/// A number is used once per key, so no two records have the same nonce.
fn nonce(number: u64, length: &[u8; LENGTH]) -> [u8; 32] {
    let mut nonce = [0; 32];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce[8..8 + LENGTH].copy_from_slice(length);
    nonce
}

/// Makes the records of one direction.
pub(super) struct Sealer {
    key: Key,
    /// The number of the next record.
    next: u64,
}

impl Sealer {
    pub(super) fn new(security: LinkSecurity, key: &[u8; 32]) -> Self {
        Self { key: Key { security, bytes: *key }, next: 0 }
    }

    /// The length of a record with `len` bytes of data.
    pub(super) fn record_len(&self, len: usize) -> usize {
        LENGTH + len + self.key.tag_len()
    }

    /// Writes the next record, with the data of both slices, into `record`, which has its length.
    pub(super) fn seal(&mut self, pieces: [&[u8]; 2], record: &mut [u8]) {
        let (length, rest) = record.split_at_mut(LENGTH);
        let (data, tag) = rest.split_at_mut(rest.len() - self.key.tag_len());
        let encoded = encode_length(data.len());
        length.copy_from_slice(&encoded);
        self.key.seal(&nonce(self.next, &encoded), pieces, data, tag);
        self.next += 1;
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
    /// Verified data for which the reader had no room. The last `num_left` bytes have not been consumed.
    left: Vec<u8>,
    num_left: usize,
}

impl Opener {
    pub(super) fn new(security: LinkSecurity, key: &[u8; 32]) -> Self {
        let buffer = vec![0; READ_AHEAD].into_boxed_slice();
        let key = Key { security, bytes: *key };
        Self { key, next: 0, buffer, begin: 0, end: 0, left: Vec::new(), num_left: 0 }
    }

    /// Verified data that has not been consumed.
    pub(super) fn left(&self) -> &[u8] {
        &self.left[self.left.len() - self.num_left..]
    }

    /// Room for arriving bytes; to be called when there is no complete record.
    pub(super) fn room(&mut self) -> &mut [u8] {
        // What has arrived of the next record is moved only if the record might not fit behind it.
        if self.begin == self.end || self.buffer.len() - self.begin < MAX_RECORD {
            self.buffer.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        &mut self.buffer[self.end..]
    }

    /// Adds `len` bytes that were read into the room.
    pub(super) fn fill(&mut self, len: usize) {
        self.end += len;
    }

    /// Copies verified data into `into`, and returns how much that is: what is left of a record, or the next one, if all of it
    /// has arrived. What does not fit is left.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, BadRecord> {
        if self.num_left == 0
            && let Some(len) = self.next_len()?.filter(|len| *len <= into.len())
        {
            return self.open(len, &mut into[..len]).map(|()| len);
        }
        self.open_ahead()?;
        let len = into.len().min(self.num_left);
        into[..len].copy_from_slice(&self.left()[..len]);
        self.num_left -= len;
        Ok(len)
    }

    /// Verifies the next record if nothing is left of the one before, and all of it has arrived.
    pub(super) fn open_ahead(&mut self) -> Result<(), BadRecord> {
        if self.num_left == 0
            && let Some(len) = self.next_len()?
        {
            let mut left = std::mem::take(&mut self.left);
            left.resize(len, 0);
            self.num_left = self.open(len, &mut left).map(|()| len)?;
            self.left = left;
        }
        Ok(())
    }

    /// The length of the data in the next record; `None` if not all of it has arrived.
    fn next_len(&self) -> Result<Option<usize>, BadRecord> {
        let Some((length, rest)) = self.buffer[self.begin..self.end].split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let bad = BadRecord::Length { number: self.next, begin: *length };
        let len = decode_length(*length).ok_or(bad)?;
        Ok((rest.len() >= len + self.key.tag_len()).then_some(len))
    }

    /// Verifies the next record, which has `len` bytes of data, into `into`.
    fn open(&mut self, len: usize, into: &mut [u8]) -> Result<(), BadRecord> {
        let record = &self.buffer[self.begin..][..LENGTH + len + self.key.tag_len()];
        let (data, tag) = record[LENGTH..].split_at(len);
        if !self.key.open(&nonce(self.next, &encode_length(len)), data, tag, into) {
            return Err(BadRecord::Tag { number: self.next });
        }
        self.next += 1;
        self.begin += record.len();
        Ok(())
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
        match opener.read(&mut [0]) {
            Ok(0) => {}
            Ok(_) => return true,
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
            let (now, later) = data.split_at(data.len().min(MAX_DATA));
            let (head, tail) = now.split_at(now.len() / 3);
            let mut record = vec![0; sealer.record_len(now.len())];
            sealer.seal([head, tail], &mut record);
            sent.extend_from_slice(&record);
            data = later;
        }
        sent
    }

    /// What comes out when `sent` goes in, in pieces of these sizes.
    fn open_all(
        opener: &mut Opener,
        mut sent: &[u8],
        mut pieces: impl Iterator<Item = usize>,
    ) -> Result<Vec<u8>, BadRecord> {
        let (mut got, mut into) = (Vec::new(), vec![0; 2 * MAX_DATA]);
        // Readers with more and with less room than a record needs.
        let mut rooms = [2 * MAX_DATA, 7, MAX_DATA / 3].into_iter().cycle();
        loop {
            let room = rooms.next().unwrap();
            let read = opener.read(&mut into[..room])?;
            got.extend_from_slice(&into[..read]);
            if read == 0 && sent.is_empty() {
                return Ok(got);
            } else if read == 0 {
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
