//! The hello, with which a client identifies itself, and the refusal that it may get.

use super::{HandshakeError, MESSAGE};
use std::fmt;

/// Longest host name.
pub const MAX_HOST: usize = 64;
/// Longest note.
pub const MAX_NOTE: usize = 256;
/// Bytes of a hello: role, rank, world size, round, pid, host, note, the last two padded.
pub(super) const SIZE: usize = 1 + 4 * 4 + (1 + MAX_HOST) + (2 + MAX_NOTE) + 12;
const NO_RANK: u32 = u32::MAX;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Requests to the store.
    Store,
    /// A link between two ranks of a group.
    Link,
}

/// The identity of a connecting client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The purpose of the connection.
    pub role: Role,
    /// Its rank; `None` for a client that is not a member, such as a launcher.
    pub rank: Option<u32>,
    /// The world size it was started with; 0 if unknown.
    pub world_size: u32,
    /// The round it belongs to.
    pub round: u32,
    /// Its host, at most [`MAX_HOST`] bytes.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// At most [`MAX_NOTE`] bytes. Links may use it freely. A store's client puts a random number there, which marks
    /// all its connections as those of one client.
    pub note: Vec<u8>,
}

impl Hello {
    /// A hello of this process, which is not a member yet.
    pub fn new(role: Role) -> Hello {
        let host = this_host();
        let pid = std::process::id();
        Hello { role, rank: None, world_size: 0, round: 0, host, pid, note: Vec::new() }
    }

    /// Sets the rank and the world size.
    #[must_use]
    pub fn member(mut self, rank: usize, world_size: usize) -> Hello {
        self.rank = Some(u32::try_from(rank).unwrap_or(NO_RANK - 1));
        self.world_size = u32::try_from(world_size).unwrap_or(u32::MAX);
        self
    }

    /// Sets the round.
    #[must_use]
    pub fn round(mut self, round: u32) -> Hello {
        self.round = round;
        self
    }

    /// Sets the note.
    #[must_use]
    pub fn note(mut self, note: &[u8]) -> Hello {
        self.note = note.into();
        self
    }

    pub(super) fn encode(&self) -> Result<[u8; SIZE], HandshakeError> {
        within("the host name", self.host.len(), MAX_HOST)?;
        within("the note", self.note.len(), MAX_NOTE)?;
        let role = match self.role {
            Role::Store => 1,
            Role::Link => 2,
        };
        let mut out = Vec::with_capacity(SIZE);
        out.push(role);
        for number in [self.rank.unwrap_or(NO_RANK), self.world_size, self.round, self.pid] {
            out.extend(number.to_le_bytes());
        }
        out.push(self.host.len() as u8);
        out.extend(self.host.as_bytes());
        out.extend((self.note.len() as u16).to_le_bytes());
        out.extend(&self.note);
        out.resize(SIZE, 0);
        Ok(out.try_into().expect("resized to this very length"))
    }

    /// Decodes a hello; `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Hello> {
        let (role, mut rest) = bytes.split_first()?;
        let role = match role {
            1 => Role::Store,
            2 => Role::Link,
            _ => return None,
        };
        let mut number = || {
            let (field, after) = rest.split_first_chunk::<4>()?;
            rest = after;
            Some(u32::from_le_bytes(*field))
        };
        let rank = number()?;
        let world_size = number()?;
        let round = number()?;
        let pid = number()?;
        let (length, rest) = rest.split_first()?;
        let (host, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let note = rest.get(..usize::from(u16::from_le_bytes(*length)))?;
        if host.len() > MAX_HOST || note.len() > MAX_NOTE {
            return None;
        }
        let rank = (rank != NO_RANK).then_some(rank);
        let host = std::str::from_utf8(host).ok()?.to_owned();
        Some(Hello { role, rank, world_size, round, host, pid, note: note.to_vec() })
    }
}

fn within(field: &'static str, bytes: usize, limit: usize) -> Result<(), HandshakeError> {
    if bytes > limit { Err(HandshakeError::TooLong { field, bytes, limit }) } else { Ok(()) }
}

/// The name of this machine, cut to [`MAX_HOST`] bytes.
pub(crate) fn this_host() -> String {
    let uname = rustix::system::uname();
    let mut host = uname.nodename().to_string_lossy().into_owned();
    host.truncate((0..=MAX_HOST).rev().find(|end| host.is_char_boundary(*end)).unwrap_or(0));
    host
}

/// Formats it as `rank 3 (node1, pid 77)`, or without a rank as `node1, pid 77`.
impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ({}, pid {})", self.host, self.pid),
            None => write!(f, "{}, pid {}", self.host, self.pid),
        }
    }
}

/// Why a member that holds the key is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Another process has the rank, or the rank is outside the world.
    Rank = 1,
    /// The world sizes differ.
    WorldSize = 2,
    /// The versions differ.
    Version = 3,
    /// The rounds differ.
    Round = 4,
    /// The job is ending.
    Ending = 5,
    /// Something else; the message says what.
    Other = 6,
}

/// A refusal: its cause, and a message with both values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The cause, for the program.
    pub cause: Cause,
    /// The message, for people.
    pub message: String,
}

impl Refusal {
    /// A refusal; the message is cut to the length that the protocol allows.
    pub fn new(cause: Cause, message: impl Into<String>) -> Refusal {
        let mut message = message.into();
        message.truncate((0..=MESSAGE).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0));
        Refusal { cause, message }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.cause as u8];
        out.extend(self.message.as_bytes());
        out.resize(1 + MESSAGE, 0);
        out
    }

    pub(super) fn decode(cause: u8, message: &[u8]) -> Refusal {
        let cause = [Cause::Rank, Cause::WorldSize, Cause::Version, Cause::Round, Cause::Ending]
            .into_iter()
            .find(|known| *known as u8 == cause)
            .unwrap_or(Cause::Other);
        let end = message.iter().position(|byte| *byte == 0).unwrap_or(message.len());
        Refusal { cause, message: String::from_utf8_lossy(&message[..end]).into_owned() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_round_trip_at_the_limits() {
        let mut hello = Hello::new(Role::Link).member(3, 8).round(2).note(&[7; MAX_NOTE]);
        hello.host = "h".repeat(MAX_HOST);
        assert_eq!(Hello::decode(&hello.encode().unwrap()), Some(hello.clone()));
        hello.rank = None;
        assert_eq!(Hello::decode(&hello.encode().unwrap()).unwrap().rank, None);
        hello.note.push(0);
        assert!(matches!(hello.encode(), Err(HandshakeError::TooLong { bytes: 257, .. })));
    }

    #[test]
    fn refusal_round_trip_and_cut() {
        let refusal = Refusal::new(Cause::Round, "é".repeat(MESSAGE));
        assert_eq!(refusal.message.len(), MESSAGE);
        let bytes = refusal.encode();
        assert_eq!(Refusal::decode(bytes[0], &bytes[1..]), refusal);
    }
}
