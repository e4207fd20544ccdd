//! What the agent and its keeper say to each other: frames of MessagePack behind their length.

use std::fmt;
use std::io::{self, Read, Write};
use std::time::Duration;

use drumline_rendezvous::fault::Fault;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::logs::AttemptLogs;
use crate::report::{Exit, JobReport};
use crate::stop::StopPolicy;
use crate::worker::WorkerSpec;

/// A frame is no longer than this: the last output of a few thousand ranks.
const LONGEST: u32 = 1 << 30;

/// What the agent wants.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Wish {
    /// Start these workers. The first word, and said once.
    Start(Box<Start>),
    /// Stop them: this signal once they have settled, and after the grace SIGKILL.
    Stop { signal: i32, settle: Duration, grace: Duration },
    /// Hand this signal on to all of them.
    Signal(i32),
    /// Kill them.
    Kill,
    /// The agent goes on without this keeper: kill what still runs, and go. Without this word the agent is dead, and its
    /// keeper tidies up in its stead.
    Bye,
    /// They may run until this moment of the clock that also runs while the machine sleeps.
    Lease(Duration),
}

/// A round's workers on this node.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) logs: AttemptLogs,
    pub(crate) stop: StopPolicy,
    pub(crate) key: Secret,
    /// Until when they may run if nothing more is said; `None`: for ever.
    pub(crate) lease: Option<Duration>,
    pub(crate) store: StoreOrder,
    /// Faults on purpose that are the launcher's to carry out.
    pub(crate) faults: Vec<Fault>,
}

/// The bytes of the job's key.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Secret(pub(crate) [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The store in which a round's workers meet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StoreOrder {
    /// Where it is.
    pub(crate) address: String,
    /// Where to listen, if this node hosts it.
    pub(crate) listen: Option<String>,
    pub(crate) world_size: usize,
    pub(crate) round: u64,
    /// How long it waits for a silent host.
    pub(crate) host_timeout: Duration,
}

/// What the keeper has seen.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum News {
    /// They could not be started, and none is left.
    NotStarted(String),
    /// A worker has failed by itself.
    Failed { rank: usize, exit: Exit, ran_for: Duration },
    /// Nothing runs any more.
    Over(JobReport),
}

pub(crate) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(message)?)
}

/// A message as it travels, to be written at once: the reader is not woken for half of it.
pub(crate) fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= LONGEST);
    let length = length.ok_or_else(|| io::Error::other("message too long"))?;
    Ok([&length.to_le_bytes(), &body[..]].concat())
}

/// The next message; `None` when there are no more.
pub(crate) fn receive<T: DeserializeOwned>(mut from: impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length);
    if length > LONGEST {
        return Err(io::Error::other("message too long"));
    }
    let mut body = vec![0; length as usize];
    from.read_exact(&mut body)?;
    rmp_serde::from_slice(&body).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_and_their_end_is_known() {
        let mut wire = Vec::new();
        send(&mut wire, &Wish::Lease(Duration::from_millis(7))).unwrap();
        send(&mut wire, &Wish::Stop { signal: 15, settle: Duration::ZERO, grace: Duration::MAX }).unwrap();
        let mut from = &wire[..];
        assert!(matches!(receive(&mut from), Ok(Some(Wish::Lease(at))) if at == Duration::from_millis(7)));
        assert!(matches!(receive(&mut from), Ok(Some(Wish::Stop { signal: 15, .. }))));
        assert!(matches!(receive::<Wish>(&mut from), Ok(None)));
        assert!(receive::<Wish>(&wire[..wire.len() - 1]).is_ok(), "the first is whole");
        assert!(receive::<Wish>(&u32::MAX.to_le_bytes()[..]).is_err());
    }
}
