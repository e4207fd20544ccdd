//! Reaching the server: resolve, connect, shake hands; again and again until it is there.

use super::wire::Wire;
use crate::handshake::{HandshakeError, Hello, Prover, YOUNG, connect_with};
use crate::reminder::Reminder;
use crate::resolve::resolve;
use crate::socket::tune;
use crate::store::error::{StoreError, Tried};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Time for one try, as long as a server has patience with a stranger.
const TRY: Duration = Duration::from_secs(5);
/// Pauses between tries grow from the first to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];
/// A server that closes at once without an answer, this often, does not know our job. (One that takes its time has
/// too many strangers and has dropped us for one of them.)
const CLOSED: u32 = 3;

const NOBODY: &str = "refused (nobody listens there)";

/// Where to go and as whom.
#[derive(Debug, Clone)]
pub(super) struct Dial {
    pub(super) addr: String,
    pub(super) prover: Prover,
    pub(super) is_secret: bool,
    pub(super) hello: Hello,
    /// The server was there before: if nobody listens now, it is gone and not late.
    pub(super) was_there: bool,
}

/// How one try ended.
enum Missed {
    /// Try again.
    Retry(String),
    /// The server closed at once without an answer.
    Closed,
    /// It will not get better.
    Final(StoreError),
}

impl Dial {
    /// The same way as nobody's member.
    pub(super) fn as_guest(&self) -> Dial {
        let mut guest = self.clone();
        guest.hello.rank = None;
        guest
    }

    /// A connection that has been let in.
    pub(super) fn open(&self, deadline: Instant) -> Result<Wire, StoreError> {
        resolve(&self.addr, deadline)?;
        let (began, mut tried, mut pause, mut closed) = (Instant::now(), Tried::default(), PAUSES[0], 0);
        let mut reminder = Reminder::new(began);
        loop {
            for (addr, result) in self.try_each(deadline) {
                match result {
                    Ok(wire) => return Ok(wire),
                    Err(Missed::Final(error)) => return Err(error),
                    Err(Missed::Closed) if closed + 1 == CLOSED => {
                        return Err(StoreError::Handshake { addr, source: HandshakeError::Closed });
                    }
                    Err(Missed::Closed) => {
                        closed += 1;
                        tried.note(addr, "closed the connection without an answer".into());
                    }
                    Err(Missed::Retry(outcome)) => tried.note(addr, outcome),
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StoreError::Unreachable {
                    addr: self.addr.clone(),
                    after: began.elapsed(),
                    tried,
                });
            }
            if reminder.is_due(Instant::now()) {
                let (rank, addr, waited) = (self.hello.rank, &self.addr, began.elapsed());
                tracing::warn!(
                    rank,
                    addr,
                    "{} still waits for the store at {addr}, {waited:.0?} so far and {left:.0?} more: {tried}",
                    self.hello
                );
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(PAUSES[1]);
        }
    }

    /// One try at each address of the name, up to the first that is more than "not there".
    fn try_each(&self, deadline: Instant) -> Vec<(String, Result<Wire, Missed>)> {
        let addrs = match self.addr.to_socket_addrs() {
            Ok(addrs) => addrs,
            Err(error) => {
                return vec![(self.addr.clone(), Err(Missed::Retry(format!("cannot be resolved: {error}"))))];
            }
        };
        let mut results = Vec::new();
        for addr in addrs {
            let result = self.try_one(addr, deadline);
            let ends = !matches!(result, Err(Missed::Retry(_)));
            results.push((addr.to_string(), result));
            if ends {
                break;
            }
        }
        results
    }

    fn try_one(&self, addr: SocketAddr, deadline: Instant) -> Result<Wire, Missed> {
        if !self.is_secret && !addr.ip().is_loopback() {
            return Err(Missed::Final(StoreError::NeedsSecret { addr: addr.to_string() }));
        }
        let now = Instant::now();
        // A deadline that has passed still gets one honest try.
        let deadline = deadline.clamp(now + PAUSES[1], now + TRY);
        let mut stream =
            TcpStream::connect_timeout(&addr, deadline - now).map_err(|source| match source.kind() {
                ErrorKind::ConnectionRefused if self.was_there => Missed::Final(StoreError::Gone {
                    addr: addr.to_string(),
                    what: "connecting once more".into(),
                    source,
                }),
                _ => Missed::Retry(describe(&source, deadline - now)),
            })?;
        if is_own_echo(&stream) {
            return Err(Missed::Retry(NOBODY.into()));
        }
        tune(&stream).map_err(|error| Missed::Retry(error.to_string()))?;
        match connect_with(&mut stream, &self.prover, &self.hello, deadline) {
            Ok(_) => Wire::new(stream).map_err(|error| Missed::Retry(error.to_string())),
            Err(HandshakeError::Closed) if now.elapsed() < YOUNG => Err(Missed::Closed),
            Err(error @ (HandshakeError::Closed | HandshakeError::Timeout(_) | HandshakeError::Io(_))) => {
                Err(Missed::Retry(format!("took the connection, then: {error}")))
            }
            Err(source) => Err(Missed::Final(StoreError::Handshake { addr: addr.to_string(), source })),
        }
    }
}

/// Trying a local port in the dynamic range over and over can, by chance, connect a socket to itself.
fn is_own_echo(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}

fn describe(error: &io::Error, after: Duration) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => NOBODY.into(),
        ErrorKind::TimedOut => format!("did not answer within {after:.1?}"),
        _ => format!("failed: {error}"),
    }
}
