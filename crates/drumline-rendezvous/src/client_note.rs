//! The note in the [`Hello`](crate::Hello) of a store's client: which client it is, what the connection is for, and
//! where its process is visible.
//!
//! ```text
//!  number: 16 bytes │ line: 1 │ process space: 8
//! ```
//!
//! One client has many connections, and opens new ones when the network breaks them. All carry the same random number.
//! By it the server recognizes one client, and a repeated request as one that it has already answered.

use crate::job_key::random_bytes;
use crate::process_space::ProcessSpace;

/// Bytes of a note.
const SIZE: usize = 16 + 1 + 8;

/// A random number that all connections of one client share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientNumber([u8; 16]);

/// What one connection of a client is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// Requests.
    Calls = 0,
    /// The *life line* of a new member: if it ends without a goodbye, the member is lost.
    Life = 1,
    /// A life line that replaces a broken one of a live member.
    Resumed = 2,
}

/// The decoded note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientNote {
    /// The client's number.
    pub number: ClientNumber,
    /// What the connection is for.
    pub line: Line,
    /// Where its process is visible.
    pub space: ProcessSpace,
}

impl ClientNumber {
    /// A new random number.
    pub fn random() -> ClientNumber {
        let mut number = [0; 16];
        random_bytes(&mut number);
        ClientNumber(number)
    }

    /// The note of a connection of this process with this purpose.
    pub fn note(self, line: Line) -> [u8; SIZE] {
        let mut note = [line as u8; SIZE];
        note[..16].copy_from_slice(&self.0);
        note[17..].copy_from_slice(&ProcessSpace::here().0);
        note
    }
}

impl ClientNote {
    /// Decodes a note; `None` if it is not that of a store's client.
    pub fn decode(note: &[u8]) -> Option<ClientNote> {
        let (number, rest) = note.split_first_chunk::<16>()?;
        let (line, space) = rest.split_first()?;
        let line = match line {
            0 => Line::Calls,
            1 => Line::Life,
            2 => Line::Resumed,
            _ => return None,
        };
        let space = ProcessSpace(space.try_into().ok()?);
        Some(ClientNote { number: ClientNumber(*number), line, space })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_round_trip_and_invalid_ones_are_none() {
        let number = ClientNumber::random();
        for line in [Line::Calls, Line::Life, Line::Resumed] {
            let space = ProcessSpace::here();
            assert_eq!(ClientNote::decode(&number.note(line)), Some(ClientNote { number, line, space }));
        }
        for note in [&[][..], &[1; 16], &[1; 17], &[1; SIZE - 1], &[3; SIZE], &[1; SIZE + 1]] {
            assert_eq!(ClientNote::decode(note), None, "{note:?}");
        }
    }
}
