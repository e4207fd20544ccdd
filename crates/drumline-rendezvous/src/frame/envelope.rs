//! The envelope of a message: what authenticates it.
//!
//! Each direction of a connection has its own key ([`Session`](crate::handshake::Session)) and counts its
//! frames, starting at 1. The *tag* is HMAC-SHA256 over head and message, cut to 16 bytes. A frame that was changed, or that belongs to
//! another connection or direction, does not match the key. One that was repeated, dropped or moved does not match the
//! count. The *check* is the same over length and counter alone, cut to 8 bytes, so that a changed length is noticed
//! before anything waits for that many bytes. Nothing is encrypted: the store's values can be read on the network.

use super::{FrameError, LEAST, MAX_FRAME};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

const CHECK: usize = 8;
const TAG: usize = 16;
/// Length, counter, check.
const HEAD: usize = 4 + 8 + CHECK;
/// Bytes of a frame besides its message.
pub const FRAME_OVERHEAD: usize = HEAD + TAG;

/// The MAC of one direction.
#[derive(Clone)]
struct Keyed(Hmac<Sha256>);

impl Keyed {
    fn new(key: &[u8; 32]) -> Keyed {
        Keyed(Hmac::new_from_slice(key).expect("HMAC takes keys of any length"))
    }

    fn check(&self, numbers: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(b"head").chain_update(numbers)
    }

    fn tag(&self, head_and_message: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(b"frame").chain_update(head_and_message)
    }
}

/// Puts messages into frames, one after the other.
pub struct Sealer {
    key: Keyed,
    last: u64,
}

impl Sealer {
    /// The first frame will be number 1.
    pub fn new(key: &[u8; 32]) -> Sealer {
        Sealer { key: Keyed::new(key), last: 0 }
    }

    /// Appends one frame to `out`, whose message is what `write` appends.
    pub fn seal(&mut self, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
        self.last += 1;
        let start = out.len();
        out.extend([0; HEAD]);
        write(out);
        let length = (out.len() - start - HEAD) as u32;
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        out[start + 4..start + 12].copy_from_slice(&self.last.to_le_bytes());
        let check = self.key.check(&out[start..start + 12]).finalize().into_bytes();
        out[start + 12..start + HEAD].copy_from_slice(&check[..CHECK]);
        let tag = self.key.tag(&out[start..]).finalize().into_bytes();
        out.extend_from_slice(&tag[..TAG]);
    }
}

/// Takes messages out of frames, in the order in which they were sealed.
pub struct Opener {
    key: Keyed,
    last: u64,
    /// The length of the message whose head was checked and which is not complete yet.
    due: Option<usize>,
}

impl Opener {
    /// The first frame must be number 1.
    pub fn new(key: &[u8; 32]) -> Opener {
        Opener { key: Keyed::new(key), last: 0, due: None }
    }

    /// The message of the first frame in `buffer` and the frame's length, if it is complete. The head is checked as
    /// soon as it has arrived. After an error the connection cannot be used any more.
    pub fn open<'a>(&mut self, buffer: &'a [u8]) -> Result<Option<(&'a [u8], usize)>, FrameError> {
        let length = match self.due {
            Some(length) => length,
            None => {
                let Some(head) = buffer.first_chunk::<HEAD>() else { return Ok(None) };
                *self.due.insert(self.open_head(head)?)
            }
        };
        let Some(frame) = buffer.get(..FRAME_OVERHEAD + length) else { return Ok(None) };
        let (sealed, tag) = frame.split_at(HEAD + length);
        let expected = self.last + 1;
        self.key.tag(sealed).verify_truncated_left(tag).map_err(|_| FrameError::Changed { expected })?;
        self.last = expected;
        self.due = None;
        Ok(Some((&sealed[HEAD..], frame.len())))
    }

    /// The length in a head, after its check and number were verified.
    fn open_head(&self, head: &[u8; HEAD]) -> Result<usize, FrameError> {
        let (numbers, check) = head.split_at(12);
        let expected = self.last + 1;
        let right = self.key.check(numbers).verify_truncated_left(check);
        right.map_err(|_| FrameError::Changed { expected })?;
        let (length, got) = numbers.split_at(4);
        let got = u64::from_le_bytes(got.try_into().expect("the other 8 of 12 bytes"));
        if got != expected {
            return Err(FrameError::Order { expected, got });
        }
        let length = u32::from_le_bytes(length.try_into().expect("4 of 12 bytes"));
        if !(LEAST..=MAX_FRAME).contains(&(length as usize)) {
            return Err(FrameError::Length { length });
        }
        Ok(length as usize)
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealer(last {})", self.last)
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opener(last {})", self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 32] = [7; 32];
    const MESSAGES: [&[u8]; 3] = [b"message one", b"the second message", b"and a third"];

    /// The three messages, a frame each.
    fn frames(key: &[u8; 32]) -> [Vec<u8>; 3] {
        let mut sealer = Sealer::new(key);
        MESSAGES.map(|message| {
            let mut frame = Vec::new();
            sealer.seal(&mut frame, |out| out.extend_from_slice(message));
            frame
        })
    }

    /// Opens the frames one after the other. Returns how many were accepted, and the error that ended it.
    fn accepted(frames: &[&[u8]]) -> (usize, Option<FrameError>) {
        let mut opener = Opener::new(&KEY);
        for (count, frame) in frames.iter().enumerate() {
            match opener.open(frame) {
                Ok(Some(_)) => {}
                Ok(None) => return (count, None),
                Err(error) => return (count, Some(error)),
            }
        }
        (frames.len(), None)
    }

    #[test]
    fn sealed_messages_are_opened_and_incomplete_ones_are_not() {
        let stream = frames(&KEY).concat();
        let (mut opener, mut at) = (Opener::new(&KEY), 0);
        for message in MESSAGES {
            for end in at..at + FRAME_OVERHEAD + message.len() {
                assert_eq!(opener.open(&stream[at..end]), Ok(None));
            }
            let (opened, used) = opener.open(&stream[at..]).unwrap().unwrap();
            assert_eq!(opened, message);
            at += used;
        }
        assert_eq!(at, stream.len());
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let [one, two, _] = frames(&KEY);
        for bit in 0..8 * two.len() {
            let mut changed = two.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let noticed = (1, Some(FrameError::Changed { expected: 2 }));
            assert_eq!(accepted(&[&one, &changed]), noticed, "bit {bit}");
        }
        assert_eq!(accepted(&[&one, &two]), (2, None), "control: unchanged");
    }

    #[test]
    fn replay_reordering_and_omission_are_noticed() {
        let [one, two, three] = &frames(&KEY);
        let order = |expected, got| Some(FrameError::Order { expected, got });
        assert_eq!(accepted(&[one, one]), (1, order(2, 1)), "repeated");
        assert_eq!(accepted(&[one, three, two]), (1, order(2, 3)), "another order");
        assert_eq!(accepted(&[two, three]), (0, order(1, 2)), "left out");
        assert_eq!(accepted(&[one, two, three]), (3, None), "control");
    }

    #[test]
    fn a_frame_of_another_connection_or_direction_is_noticed() {
        let other = frames(&[8; 32]);
        assert_eq!(accepted(&[&other[0]]), (0, Some(FrameError::Changed { expected: 1 })));
    }

    #[test]
    fn lengths_beyond_the_limit_are_refused_by_the_head() {
        for length in [0, 8, MAX_FRAME as u32 + 1, u32::MAX] {
            let mut head = [0; HEAD];
            head[..4].copy_from_slice(&length.to_le_bytes());
            head[4..12].copy_from_slice(&1u64.to_le_bytes());
            let check = Keyed::new(&KEY).check(&head[..12]).finalize().into_bytes();
            head[12..].copy_from_slice(&check[..CHECK]);
            assert_eq!(accepted(&[&head]), (0, Some(FrameError::Length { length })));
        }
    }
}
