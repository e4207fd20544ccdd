//! One request in a store file: the length of its message as 4 bytes, little endian, and the message.
//!
//! Processes that can write the file are trusted, so records have no MAC. The number of each record shows that none is
//! missing.

use crate::frame::{Call, Frame, FrameError, MAX_FRAME, encode_call};
use crate::store::request::Request;

/// Removes the first record from `bytes`, if it is complete.
pub(super) fn split<'a>(bytes: &mut &'a [u8]) -> Result<Option<Frame<'a>>, FrameError> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length);
    if length as usize > MAX_FRAME {
        return Err(FrameError::Length { length });
    }
    let Some((message, rest)) = rest.split_at_checked(length as usize) else { return Ok(None) };
    *bytes = rest;
    Frame::read(message).map(Some)
}

/// The bytes of record `number`.
pub(super) fn encode(number: u64, request: &Request) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    encode_call(number, number, &Call::Request(request.clone()), &mut bytes);
    let length = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_incomplete_ones_wait() {
        let request = Request::Add { key: "k".into(), delta: 3 };
        let bytes = encode(9, &request);
        for cut in 0..bytes.len() {
            assert_eq!(split(&mut &bytes[..cut]), Ok(None), "cut at {cut}");
        }
        let mut rest = bytes.as_slice();
        let record = split(&mut rest).unwrap().unwrap();
        assert_eq!((record.id, record.call()), (9, Ok((9, Call::Request(request)))));
        assert!(rest.is_empty());
        let length = MAX_FRAME as u32 + 1;
        assert_eq!(split(&mut &length.to_le_bytes()[..]), Err(FrameError::Length { length }));
    }
}
