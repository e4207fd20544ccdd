//! The answer to a connection that resumes a link: how many bytes the accepting side has received, and a tag that proves it.
//!
//! ```text
//!   received 8 | tag 32
//! ```
//! The connecting side's number is in the handshake. If somebody changed the answer, the connecting side would send again from
//! a wrong position. The tag is made with the new connection's key, which is used for nothing else: records keep the key of the
//! link's first connection. So it protects the links that have no records, too.

use aegis::aegis256x4::Aegis256X4Mac;
use drumline_rendezvous::handshake::Session;

const TAG: usize = 32;

/// Bytes of the answer.
pub(super) const ANSWER: usize = 8 + TAG;

/// The answer was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the number that says how many bytes were received does not prove its origin: it was changed on its way; try finding out \
     who sits between the two hosts"
)]
pub(super) struct BadAnswer;

/// The answer of a side that has received this many bytes.
pub(super) fn encode(received: u64, session: &Session) -> [u8; ANSWER] {
    let mut answer = [0; ANSWER];
    let (number, tag) = answer.split_at_mut(8);
    number.copy_from_slice(&received.to_le_bytes());
    tag.copy_from_slice(&mac(session.outgoing(), number).finalize());
    answer
}

/// The number of bytes that the other side has received.
pub(super) fn decode(answer: &[u8; ANSWER], session: &Session) -> Result<u64, BadAnswer> {
    let (number, tag) = answer.split_first_chunk::<8>().ok_or(BadAnswer)?;
    let tag = tag.first_chunk::<TAG>().ok_or(BadAnswer)?;
    mac(session.incoming(), number).verify(tag).map_err(|_| BadAnswer)?;
    Ok(u64::from_le_bytes(*number))
}

fn mac(key: &[u8; 32], number: &[u8]) -> Aegis256X4Mac<TAG> {
    let mut mac = Aegis256X4Mac::new(key);
    mac.update(number);
    mac
}
