//! TFRecord, the frame around each message of an event file.
//!
//! ```text
//!   length: u64 │ check of the length: u32 │ the message │ check of the message: u32       little endian
//! ```
//! A check is a CRC-32C, rotated by 15 bits and increased by a constant, so that it also works over bytes that contain checks.

use prost::Message;

/// A message in its frame.
pub(super) fn of(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    let len = (bytes.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(bytes.len() + 16);
    record.extend_from_slice(&len);
    record.extend_from_slice(&check(&len).to_le_bytes());
    record.extend_from_slice(&bytes);
    record.extend_from_slice(&check(&bytes).to_le_bytes());
    record
}

fn check(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_has_the_documented_format() {
        // CRC-32C of "123456789" is the check value of its definition.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let turned = 0xe306_9283_u32.rotate_right(15);
        assert_eq!(check(b"123456789"), turned.wrapping_add(0xa282_ead8));
        let record = of(&"abc".to_owned());
        // A string in prost is a message with field 1.
        assert_eq!(record[..8], 5_u64.to_le_bytes());
        assert_eq!(record[12..17], [0x0a, 3, b'a', b'b', b'c']);
        assert_eq!(record.len(), 8 + 4 + 5 + 4);
    }
}
