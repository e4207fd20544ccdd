//! The messages between an agent and its keeper: MessagePack frames, each preceded by its length.

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

/// The longest frame: it holds the last output of a few thousand ranks.
const LONGEST: u32 = 1 << 30;

/// A command of the agent to its keeper.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperCommand {
    /// Start these workers. Always the first command, and sent once.
    Start(Box<Start>),
    /// Stop them: send this signal once they have settled, and SIGKILL after the grace time.
    Stop { signal: i32, settle: Duration, grace: Duration },
    /// Forward this signal to all of them.
    Signal(i32),
    /// Kill them.
    Kill,
    /// The agent no longer needs this keeper: kill what still runs, and exit. If the socket closes without this
    /// command, the agent has died, and the keeper removes temporary files for it.
    Bye,
    /// They may run until this time, on the clock that also runs while the machine sleeps.
    Lease(Duration),
}

/// A round's workers on this node.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) workers: Vec<WorkerSpec>,
    pub(crate) logs: AttemptLogs,
    pub(crate) stop: StopPolicy,
    pub(crate) key: Secret,
    /// Until when they may run unless the lease is renewed; `None` means no limit.
    pub(crate) lease: Option<Duration>,
    pub(crate) store: StoreSettings,
    /// Injected faults that the launcher carries out.
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

/// The store through which a round's workers find each other.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StoreSettings {
    /// The address at which the workers reach it.
    pub(crate) address: String,
    /// The address to listen on, if this node hosts the store.
    pub(crate) listen: Option<String>,
    pub(crate) world_size: usize,
    pub(crate) round: u64,
    /// How long the store waits for a silent host.
    pub(crate) host_timeout: Duration,
}

/// A report of the keeper to its agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperReport {
    /// The workers could not be started, and none is left running.
    NotStarted(String),
    /// A worker has failed.
    Failed { rank: usize, exit: Exit, ran_for: Duration },
    /// No worker runs any more.
    Over(JobReport),
}

pub(crate) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(message)?)
}

/// Encodes a message as one frame, to be written at once, so that the reader is not woken for half a frame.
pub(crate) fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length <= LONGEST);
    let length = length.ok_or_else(|| io::Error::other("message too long"))?;
    Ok([&length.to_le_bytes(), &body[..]].concat())
}

/// Reads the next message; `None` at the end of the stream.
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
    fn messages_arrive_whole_and_the_end_is_recognized() {
        let mut wire = Vec::new();
        send(&mut wire, &KeeperCommand::Lease(Duration::from_millis(7))).unwrap();
        send(&mut wire, &KeeperCommand::Stop { signal: 15, settle: Duration::ZERO, grace: Duration::MAX })
            .unwrap();
        let mut from = &wire[..];
        assert!(
            matches!(receive(&mut from), Ok(Some(KeeperCommand::Lease(at))) if at == Duration::from_millis(7))
        );
        assert!(matches!(receive(&mut from), Ok(Some(KeeperCommand::Stop { signal: 15, .. }))));
        assert!(matches!(receive::<KeeperCommand>(&mut from), Ok(None)));
        assert!(receive::<KeeperCommand>(&wire[..wire.len() - 1]).is_ok(), "the first frame is complete");
        assert!(receive::<KeeperCommand>(&u32::MAX.to_le_bytes()[..]).is_err());
    }
}
