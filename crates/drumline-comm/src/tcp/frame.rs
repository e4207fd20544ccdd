//! The header of data on a link: of fixed length, and checked before anything is read into a buffer.
//!
//! ```text
//!   magic 4 | step 4 | sequence 8 | fingerprint 8 | length 8          collective data, read straight into place
//!   magic 4 | dtype 1, zero 3 | tag 8 | elements 8 | length 8         a point-to-point message
//!   magic 4 | text 28                                                 goodbye: the last header of a link
//! ```
//! Numbers are little-endian. A length is only compared with what the receiver expects, or with a limit; it never decides alone
//! how much memory is allocated.

use crate::element::DType;

/// Bytes of either header.
pub(crate) const HEADER: usize = 32;

const DATA_MAGIC: [u8; 4] = *b"DLd1";
const MAIL_MAGIC: [u8; 4] = *b"DLm1";

/// Sent instead of a header: nothing more will come. A connection that ends without it has broken.
pub(crate) const GOODBYE: [u8; HEADER] = *b"DLx1 nothing more will come here";

/// The most bytes that a receiver keeps from one rank of messages that it did not expect.
pub(crate) const MAX_UNEXPECTED: u64 = 1 << 30;

/// Announces the data of one step of a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DataHeader {
    pub(crate) step: u32,
    pub(crate) sequence: u64,
    pub(crate) fingerprint: u64,
    pub(crate) len: u64,
}

/// Announces a point-to-point message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MailHeader {
    pub(crate) dtype: DType,
    pub(crate) tag: u64,
    pub(crate) elements: u64,
}

/// Why bytes are no header.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum BadHeader {
    #[error("it begins with {0:02x?}, which no rank of this version sends")]
    Magic([u8; 4]),
    #[error("element type {0} is not known")]
    DType(u8),
    #[error("{elements} elements of {dtype} do not make {len} bytes")]
    Length { elements: u64, dtype: DType, len: u64 },
}

impl DataHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&DATA_MAGIC);
        bytes[4..8].copy_from_slice(&self.step.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.fingerprint.to_le_bytes());
        bytes[24..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, BadHeader> {
        check_magic(bytes, DATA_MAGIC)?;
        Ok(Self {
            step: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            sequence: word(bytes, 8),
            fingerprint: word(bytes, 16),
            len: word(bytes, 24),
        })
    }
}

impl MailHeader {
    pub(crate) fn bytes(&self) -> u64 {
        self.elements * self.dtype.size() as u64
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAIL_MAGIC);
        bytes[4] = self.dtype as u8;
        bytes[8..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.elements.to_le_bytes());
        bytes[24..].copy_from_slice(&self.bytes().to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, BadHeader> {
        check_magic(bytes, MAIL_MAGIC)?;
        let dtype = DType::from_code(bytes[4]).ok_or(BadHeader::DType(bytes[4]))?;
        let (tag, elements, len) = (word(bytes, 8), word(bytes, 16), word(bytes, 24));
        if elements.checked_mul(dtype.size() as u64) != Some(len) {
            return Err(BadHeader::Length { elements, dtype, len });
        }
        Ok(Self { dtype, tag, elements })
    }
}

fn check_magic(bytes: &[u8; HEADER], expected: [u8; 4]) -> Result<(), BadHeader> {
    let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if magic == expected { Ok(()) } else { Err(BadHeader::Magic(magic)) }
}

fn word(bytes: &[u8; HEADER], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_a_round_trip(step: u32, sequence: u64, fingerprint: u64, len: u64, tag: u64, elements in 0u64..1 << 60) {
            let data = DataHeader { step, sequence, fingerprint, len };
            prop_assert_eq!(DataHeader::decode(&data.encode()), Ok(data));
            let mail = MailHeader { dtype: DType::I16, tag, elements };
            prop_assert_eq!(MailHeader::decode(&mail.encode()), Ok(mail));
            prop_assert!(MailHeader::decode(&data.encode()).is_err());
        }

        #[test]
        fn the_decoders_accept_any_bytes_without_a_panic(bytes: [u8; HEADER]) {
            let _ = DataHeader::decode(&bytes);
            let _ = MailHeader::decode(&bytes);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let mut bytes = MailHeader { dtype: DType::F32, tag: 0, elements: 3 }.encode();
        bytes[24] = 11;
        assert!(matches!(MailHeader::decode(&bytes), Err(BadHeader::Length { .. })));
        let huge = MailHeader { dtype: DType::F32, tag: 0, elements: 1 };
        let mut bytes = huge.encode();
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(MailHeader::decode(&bytes), Err(BadHeader::Length { .. })));
    }
}
