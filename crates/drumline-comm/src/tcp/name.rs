//! What a rank sends about a link when it makes or resumes one: which link it is, and how it is protected.
//!
//! ```text
//!   channel 1 | security 1 | resumes 1 | meeting 8 | received 8 | from 4 | to 4 | group, at most 229 bytes
//! ```
//! It travels in the note of the handshake, so both sides prove it, and the link's keys depend on it: a link cannot be passed off
//! as another, nor led to another rank.

use super::security::LinkSecurity;

/// What a link is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Channel {
    /// Collectives, both ways.
    Data = 1,
    /// Point-to-point messages, from the side that connected.
    Mail = 2,
}

/// Which link: its group, its purpose, and its two ranks of the job. The round is in the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LinkName {
    pub(crate) group: String,
    pub(crate) channel: Channel,
    /// The rank that connects.
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// The note of a link's handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkNote {
    pub(crate) name: LinkName,
    pub(crate) security: LinkSecurity,
    /// The number of the meeting that the group belongs to.
    pub(crate) meeting: u64,
    /// For a resumed link: the number of bytes that the connecting side has received over it so far.
    pub(crate) resumes: Option<u64>,
}

impl LinkNote {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let LinkName { group, channel, from, to } = &self.name;
        let mut note = vec![*channel as u8, self.security as u8, u8::from(self.resumes.is_some())];
        note.extend_from_slice(&self.meeting.to_le_bytes());
        note.extend_from_slice(&self.resumes.unwrap_or(0).to_le_bytes());
        note.extend_from_slice(&(*from as u32).to_le_bytes());
        note.extend_from_slice(&(*to as u32).to_le_bytes());
        note.extend_from_slice(group.as_bytes());
        note
    }

    pub(crate) fn decode(note: &[u8]) -> Option<Self> {
        let (&[channel, security, resumes], rest) = note.split_first_chunk::<3>()?;
        let (meeting, rest) = rest.split_first_chunk::<8>()?;
        let (received, rest) = rest.split_first_chunk::<8>()?;
        let (from, rest) = rest.split_first_chunk::<4>()?;
        let (to, group) = rest.split_first_chunk::<4>()?;
        let channel = match channel {
            1 => Channel::Data,
            2 => Channel::Mail,
            _ => return None,
        };
        let resumes = match (resumes, u64::from_le_bytes(*received)) {
            (0, 0) => None,
            (1, received) => Some(received),
            _ => return None,
        };
        let name = LinkName {
            group: std::str::from_utf8(group).ok()?.to_owned(),
            channel,
            from: u32::from_le_bytes(*from) as usize,
            to: u32::from_le_bytes(*to) as usize,
        };
        let security = LinkSecurity::from_code(security)?;
        Some(Self { name, security, meeting: u64::from_le_bytes(*meeting), resumes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn notes_survive_a_round_trip(group in "[a-z/0-9.]{0,40}", from: u32, to: u32, meeting: u64, resumes: Option<u64>) {
            let name = LinkName { group, channel: Channel::Mail, from: from as usize, to: to as usize };
            let note = LinkNote { name, security: LinkSecurity::Mac, meeting, resumes };
            prop_assert_eq!(LinkNote::decode(&note.encode()), Some(note));
        }

        #[test]
        fn the_decoder_accepts_any_bytes_without_a_panic(bytes in prop::collection::vec(0u8..4, 0..64)) {
            if let Some(note) = LinkNote::decode(&bytes) {
                prop_assert_eq!(note.encode(), bytes);
            }
        }
    }
}
