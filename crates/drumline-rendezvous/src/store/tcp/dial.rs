//! Reaches the server: resolves its name, connects, and shakes hands; retries until the server answers.

use super::life_line::LifeLineControl;
use super::silence::Silence;
use super::wire::Wire;
use crate::JobKey;
use crate::client_note::{ClientNumber, Line};
use crate::handshake::{HandshakeError, Hello, Prover, YOUNG, connect_with};
use crate::reminder::Reminder;
use crate::resolve::resolve;
use crate::socket::tune;
use crate::store::error::{StoreError, Tried};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of one attempt: as long as a server waits for a handshake.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The same for a server that was reached before. After an outage the system's own retries come late, ours do not.
const ATTEMPT_AGAIN: Duration = Duration::from_secs(2);
/// The part of an attempt in which the other host must answer at all. It starts with the first value and doubles; for a
/// server that was reached before, up to the second. A server under a flood drops first packets, and the system sends
/// them again after a second or more.
const REACH: Duration = Duration::from_millis(500);
const REACH_AGAIN: Duration = Duration::from_secs(1);
/// Pauses between attempts grow from the first to the second value.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];
/// The pause after a host that was reached before accepted a connection and did not answer: its process is frozen, and
/// has to clear our connections later.
const FROZEN: Duration = Duration::from_secs(3);
/// A server that closes this many connections immediately, without an answer, does not know our job. (A server with too
/// many pending connections may drop ours, but hardly every time.)
const CLOSED: u32 = 8;

/// How long an address is skipped after its server did not prove the job key: another server may have the port by then.
const SKIP: Duration = Duration::from_secs(2);

const OTHER_SERVER: &str = "belongs to a server that does not prove the job key";
const NO_SERVER: &str = "refused (no server listens there)";

/// The server's address, and the identity of this client.
#[derive(Debug, Clone)]
pub(super) struct Dial {
    pub(super) addr: String,
    pub(super) prover: Prover,
    pub(super) is_secret: bool,
    pub(super) hello: Hello,
    pub(super) number: ClientNumber,
    /// Where the server was reached before. If nothing listens there now, the server is gone, not late.
    pub(super) last_seen: LastSeen,
    /// Ends an attempt early.
    pub(super) control: Option<Arc<LifeLineControl>>,
}

/// Where the server was reached before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastSeen {
    /// It was never reached.
    Never,
    /// On this machine: only its own kernel refuses a connection.
    ThisHost,
    /// On another host: a firewall in between may refuse, too.
    OtherHost,
}

impl LastSeen {
    /// Determines it from the addresses of a connection.
    pub(super) fn at(local: IpAddr, server: IpAddr) -> LastSeen {
        if server.is_loopback() || server == local { LastSeen::ThisHost } else { LastSeen::OtherHost }
    }
}

/// How an attempt failed.
enum AttemptError {
    /// Try again.
    Retry(String),
    /// The server that was reached before is gone, or a firewall refuses.
    Refused(io::Error),
    /// The host accepted the connection, and its server did not answer; try again.
    Frozen(String),
    /// The server closed at once without an answer.
    Closed,
    /// Retrying does not help.
    Final(StoreError),
}

impl Dial {
    pub(super) fn new(addr: &str, key: &JobKey, hello: Hello) -> Dial {
        Dial {
            addr: addr.into(),
            prover: Prover::from(key),
            is_secret: key.is_secret(),
            hello,
            number: ClientNumber::random(),
            last_seen: LastSeen::Never,
            control: None,
        }
    }

    fn was_reached(&self) -> bool {
        self.last_seen != LastSeen::Never
    }

    /// The purpose of the first connection.
    pub(super) fn first_line(&self) -> Line {
        if self.hello.rank.is_some() { Line::Life } else { Line::Calls }
    }

    /// The same dial for another purpose.
    pub(super) fn line(&self, line: Line) -> Dial {
        Dial { hello: self.hello.clone().note(&self.number.note(line)), ..self.clone() }
    }

    /// The same dial for a client that is not a member.
    pub(super) fn as_guest(&self) -> Dial {
        let mut guest = self.clone();
        guest.hello.rank = None;
        guest
    }

    /// Opens a connection. A host that was reached before is given up when it was silent for too long.
    pub(super) fn open(&self, deadline: Instant, silence: &Silence) -> Result<Wire, StoreError> {
        let mut attempts = Attempts::new(self, deadline)?;
        loop {
            if let Some(wire) = attempts.round(silence)? {
                return Ok(wire);
            }
            let now = Instant::now();
            let end = silence.ends().filter(|_| self.was_reached()).map_or(deadline, |end| end.min(deadline));
            let left = end.saturating_duration_since(now);
            if left.is_zero() {
                return Err(attempts.into_error());
            }
            attempts.remind(left);
            std::thread::sleep(attempts.pause().min(left));
        }
    }

    /// Opens a connection to the first of several addresses whose server proves the job key; they are tried in turn.
    pub(super) fn open_first(
        dials: &[Dial],
        deadline: Instant,
        silence: &Silence,
    ) -> Result<Opened, StoreError> {
        let mut candidates = Vec::new();
        for dial in dials {
            candidates.push(Candidate { attempts: Attempts::new(dial, deadline)?, skip_until: None });
        }
        loop {
            for (candidate, dial) in candidates.iter_mut().zip(dials) {
                if let Some(wire) = candidate.round(silence)? {
                    return Ok(Opened { wire, dial: dial.clone() });
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(not_on_any_port(candidates));
            }
            let mut pause = PAUSES[1];
            for candidate in &mut candidates {
                candidate.attempts.remind(left);
                pause = pause.min(candidate.attempts.pause());
            }
            std::thread::sleep(pause.min(left));
        }
    }

    /// One attempt at each address of the name, up to the first that does more than fail to connect.
    fn try_each(&self, deadline: Instant, reach: Duration) -> Vec<(String, Result<Wire, AttemptError>)> {
        let addrs = match self.addr.to_socket_addrs() {
            Ok(addrs) => addrs,
            Err(error) => {
                return vec![(
                    self.addr.clone(),
                    Err(AttemptError::Retry(format!("cannot be resolved: {error}"))),
                )];
            }
        };
        let mut results = Vec::new();
        for addr in addrs {
            let result = self.try_one(addr, deadline, reach);
            let ends = !matches!(
                result,
                Err(AttemptError::Retry(_) | AttemptError::Frozen(_) | AttemptError::Refused(_))
            );
            results.push((addr.to_string(), result));
            if ends {
                break;
            }
        }
        results
    }

    fn try_one(&self, addr: SocketAddr, deadline: Instant, reach: Duration) -> Result<Wire, AttemptError> {
        if !self.is_secret && !addr.ip().is_loopback() {
            return Err(AttemptError::Final(StoreError::NeedsSecret { addr: addr.to_string() }));
        }
        let now = Instant::now();
        let timeout = if self.was_reached() { ATTEMPT_AGAIN } else { ATTEMPT };
        // Even if the deadline has passed, make one real attempt.
        let deadline = deadline.clamp(now + PAUSES[1], now + timeout);
        let reach = reach.min(deadline - now);
        let mut stream = TcpStream::connect_timeout(&addr, reach).map_err(|source| match source.kind() {
            ErrorKind::ConnectionRefused if self.was_reached() => AttemptError::Refused(source),
            _ => AttemptError::Retry(describe(&source, reach)),
        })?;
        if is_connected_to_itself(&stream) {
            return Err(AttemptError::Retry(NO_SERVER.into()));
        }
        if let Some(control) = &self.control {
            control.attach(&stream);
        }
        tune(&stream).map_err(|error| AttemptError::Retry(error.to_string()))?;
        let described = |error: HandshakeError| format!("accepted the connection, then: {error}");
        match connect_with(&mut stream, &self.prover, &self.hello, deadline) {
            Ok(session) => Ok(Wire::new(stream, &session)),
            Err(HandshakeError::Closed) if now.elapsed() < YOUNG => Err(AttemptError::Closed),
            Err(error @ HandshakeError::Timeout(_)) => Err(AttemptError::Frozen(described(error))),
            Err(error @ (HandshakeError::Closed | HandshakeError::Io(_))) => {
                Err(AttemptError::Retry(described(error)))
            }
            Err(source) => Err(AttemptError::Final(StoreError::Handshake { addr: addr.to_string(), source })),
        }
    }
}

/// A connection, and the dial that opened it.
pub(super) struct Opened {
    pub(super) wire: Wire,
    pub(super) dial: Dial,
}

/// One of several addresses.
struct Candidate<'a> {
    attempts: Attempts<'a>,
    /// Skipped until then, because another server listens there.
    skip_until: Option<Instant>,
}

impl Candidate<'_> {
    /// Like [`Attempts::round`], but for a while skips a server that does not prove the job key.
    fn round(&mut self, silence: &Silence) -> Result<Option<Wire>, StoreError> {
        if self.skip_until.is_some_and(|until| Instant::now() < until) {
            return Ok(None);
        }
        match self.attempts.round(silence) {
            Err(StoreError::Handshake {
                addr,
                source: HandshakeError::Closed | HandshakeError::NotProved,
            }) => {
                self.attempts.tried.note(addr, OTHER_SERVER.into());
                self.skip_until = Some(Instant::now() + SKIP);
                Ok(None)
            }
            other => other,
        }
    }
}

fn not_on_any_port(candidates: Vec<Candidate<'_>>) -> StoreError {
    let mut host = String::new();
    let mut after = Duration::ZERO;
    let mut tried = Tried::default();
    for Candidate { attempts, .. } in candidates {
        let addr = &attempts.dial.addr;
        host = addr.rsplit_once(':').map_or(addr.as_str(), |(host, _)| host).to_string();
        after = after.max(attempts.began.elapsed());
        tried.append(attempts.tried);
    }
    StoreError::NotOnAnyPort { host, after, tried }
}

/// The attempts so far.
pub(super) struct Attempts<'a> {
    dial: &'a Dial,
    deadline: Instant,
    began: Instant,
    tried: Tried,
    closed: u32,
    pause: Duration,
    reach: Duration,
    is_frozen: bool,
    reminder: Reminder,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(dial: &'a Dial, deadline: Instant) -> Result<Attempts<'a>, StoreError> {
        // A name that was resolved once will be resolved again.
        if !dial.was_reached() {
            resolve(&dial.addr, deadline)?;
        }
        let began = Instant::now();
        let tried = Tried::default();
        let reminder = Reminder::new(began);
        Ok(Attempts {
            dial,
            deadline,
            began,
            tried,
            closed: 0,
            pause: PAUSES[0],
            reach: REACH,
            is_frozen: false,
            reminder,
        })
    }

    /// One attempt at each address; `None` means: try again after a [`pause`](Self::pause).
    pub(super) fn round(&mut self, silence: &Silence) -> Result<Option<Wire>, StoreError> {
        self.is_frozen = false;
        let reach = self.reach;
        self.reach = (reach * 2).min(if self.dial.was_reached() { REACH_AGAIN } else { ATTEMPT });
        let mut refused = None;
        let mut is_only_refused = true;
        for (addr, result) in self.dial.try_each(self.deadline, reach) {
            is_only_refused &= matches!(result, Err(AttemptError::Refused(_)));
            match result {
                Ok(wire) => {
                    silence.end();
                    return Ok(Some(wire));
                }
                Err(AttemptError::Final(error)) => return Err(error),
                Err(AttemptError::Closed) if self.is_unknown_to_server() => {
                    return Err(StoreError::Handshake { addr, source: HandshakeError::Closed });
                }
                Err(AttemptError::Closed) => {
                    self.closed += 1;
                    self.tried.note(addr, "closed the connection without an answer".into());
                }
                Err(AttemptError::Frozen(outcome)) => {
                    // The host is alive. Its process may be frozen, for which each request has its own deadline.
                    silence.end();
                    self.is_frozen = true;
                    self.tried.note(addr, outcome);
                }
                Err(AttemptError::Retry(outcome)) => {
                    silence.unreached(Instant::now());
                    self.tried.note(addr, outcome);
                }
                Err(AttemptError::Refused(source)) => {
                    self.tried.note(addr.clone(), NO_SERVER.into());
                    refused = Some((addr, source));
                }
            }
        }
        match refused {
            Some((addr, source)) if is_only_refused && self.is_gone(silence) => {
                Err(StoreError::Gone { addr, what: "connecting again".into(), source })
            }
            _ => Ok(None),
        }
    }

    /// Whether one more refusal means that the server's process has ended.
    fn is_gone(&self, silence: &Silence) -> bool {
        let for_good = silence.is_refused_for_good(Instant::now());
        self.dial.last_seen == LastSeen::ThisHost || for_good
    }

    /// Whether one more closed connection means that the server does not know our job. A server that knew it before
    /// gets more time: a firewall may close all connections for a while.
    fn is_unknown_to_server(&self) -> bool {
        self.closed + 1 >= CLOSED && (!self.dial.was_reached() || self.began.elapsed() > ATTEMPT)
    }

    /// How long to pause before the next round.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 3 / 2).min(PAUSES[1]);
        if self.is_frozen && self.dial.was_reached() { FROZEN } else { pause }
    }

    fn remind(&mut self, left: Duration) {
        if self.reminder.is_due(Instant::now()) {
            let Dial { addr, hello, .. } = self.dial;
            let rank = hello.rank;
            let waited = self.began.elapsed();
            let tried = &self.tried;
            tracing::warn!(
                rank,
                addr,
                "{hello} is still waiting for the store at {addr}, {waited:.0?} so far and {left:.0?} more: {tried}"
            );
        }
    }

    fn into_error(self) -> StoreError {
        StoreError::Unreachable {
            addr: self.dial.addr.clone(),
            after: self.began.elapsed(),
            tried: self.tried,
        }
    }
}

/// Connecting repeatedly to a local port in the ephemeral range can, by chance, connect a socket to itself.
fn is_connected_to_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}

fn describe(error: &io::Error, after: Duration) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => NO_SERVER.into(),
        ErrorKind::TimedOut => format!("did not answer within {after:.1?}"),
        _ => format!("failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Role;
    use crate::{ServerOptions, TcpStoreServer};

    /// A dial to a server that was reached before, and its port, where nothing listens now.
    fn refused(last_seen: LastSeen, key: &JobKey) -> (Dial, SocketAddr) {
        let server = TcpStoreServer::bind("127.0.0.1:0", key, ServerOptions::default()).unwrap();
        let addr = server.local_addr();
        let dial = Dial::new(&addr.to_string(), key, Hello::new(Role::Store));
        (Dial { last_seen, ..dial.line(Line::Calls) }, addr)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn a_refusing_server_is_gone_at_once_on_this_host_and_later_on_others() {
        let (key, least) = (JobKey::random(), Duration::from_millis(1500));
        for (last_seen, within) in [(LastSeen::ThisHost, least), (LastSeen::OtherHost, 2 * least)] {
            let (dial, _) = refused(last_seen, &key);
            let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
            let error = dial.open(soon(), &silence).unwrap_err();
            let took = began.elapsed();
            assert!(matches!(error, StoreError::Gone { .. }), "{last_seen:?}: {error}");
            assert!(
                took < within && (took >= least) == (last_seen == LastSeen::OtherHost),
                "{last_seen:?}: {took:?}"
            );
        }
    }

    #[test]
    fn a_firewall_that_refuses_for_a_moment_is_tolerated() {
        let key = JobKey::random();
        for last_seen in [LastSeen::OtherHost, LastSeen::ThisHost] {
            let (dial, addr) = refused(last_seen, &key);
            let again = std::thread::spawn({
                let key = key.clone();
                move || {
                    std::thread::sleep(Duration::from_millis(500));
                    TcpStoreServer::bind(addr, &key, ServerOptions::default()).unwrap()
                }
            });
            let silence = Silence::new(Duration::from_secs(30));
            // A call with a shorter deadline gives up earlier, and the next one still counts from the first refusal.
            let short = dial.open(Instant::now() + Duration::from_millis(100), &silence);
            assert_eq!(
                matches!(short, Err(StoreError::Unreachable { .. })),
                last_seen == LastSeen::OtherHost,
                "{last_seen:?}"
            );
            assert_eq!(
                dial.open(soon(), &silence).is_ok(),
                last_seen == LastSeen::OtherHost,
                "{last_seen:?}"
            );
            drop(again.join().unwrap());
        }
    }

    #[test]
    fn the_location_follows_from_both_addresses() {
        let at = |local: &str, server: &str| LastSeen::at(local.parse().unwrap(), server.parse().unwrap());
        assert_eq!(at("127.0.0.1", "127.0.0.2"), LastSeen::ThisHost);
        assert_eq!(at("10.0.0.1", "10.0.0.1"), LastSeen::ThisHost);
        assert_eq!(at("10.0.0.1", "10.0.0.2"), LastSeen::OtherHost);
    }
}
