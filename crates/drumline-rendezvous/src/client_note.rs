//! What a store's client writes into the note of its [`Hello`](crate::Hello): who it is, what the connection is for, and
//! who can see its process.
//!
//! ```text
//!  number: 16 bytes │ line: 1 │ process space: 8
//! ```
//!
//! One client has many connections, and makes new ones when the network breaks them. All bear the same random number;
//! by it the server knows them as one client's, and a request that comes again as one that it has answered before.

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
    /// The *life line* of a new member: should it end without a goodbye, the member is lost.
    Life = 1,
    /// The life line of a member whose earlier one broke while it lives.
    Resumed = 2,
}

/// A client's number, what the connection is for, and where its process can be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientNote {
    /// Whose connection.
    pub number: ClientNumber,
    /// What for.
    pub line: Line,
    /// Where its process can be seen.
    pub space: ProcessSpace,
}

impl ClientNumber {
    /// A number that nobody else has.
    pub fn random() -> ClientNumber {
        let mut number = [0; 16];
        random_bytes(&mut number);
        ClientNumber(number)
    }

    /// The note of a connection of this process that is for `line`.
    pub fn note(self, line: Line) -> [u8; SIZE] {
        let mut note = [line as u8; SIZE];
        note[..16].copy_from_slice(&self.0);
        note[17..].copy_from_slice(&ProcessSpace::here().0);
        note
    }
}

impl ClientNote {
    /// Reads a note; `None` if it is not one of a store's client.
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
    fn notes_come_back_and_others_are_none() {
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
