//! Reaching the server: resolve, connect, shake hands; again and again until it is there.

use super::life_line::Reins;
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

/// Time for one try, as long as a server has patience with a stranger.
const TRY: Duration = Duration::from_secs(5);
/// Time for one try at a server that was there before. After an outage the system's own tries come late, ours do not.
const TRY_AGAIN: Duration = Duration::from_secs(2);
/// The part of it in which the other host must answer at all; after an outage the longest, otherwise the first, which then
/// doubles. A server with a flood of strangers drops first packets, and the system sends them again after a second or more.
const REACH: Duration = Duration::from_millis(500);
const REACH_AGAIN: Duration = Duration::from_secs(1);
/// Pauses between tries grow from the first to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];
/// Pause after a host that was there before has taken a connection and said nothing: its process stands still, and what
/// we leave there has to be cleared away by it later.
const FROZEN: Duration = Duration::from_secs(3);
/// A server that closes at once without an answer, this often, does not know our job. (One with too many strangers may
/// have dropped us for one of them, but hardly every time.)
const CLOSED: u32 = 8;

/// Pause before somebody who did not prove the job key is asked again: another may have the port by then.
const REST: Duration = Duration::from_secs(2);

const STRANGER: &str = "is held by somebody who does not prove the job key";
const NOBODY: &str = "refused (nobody listens there)";

/// Where to go and as whom.
#[derive(Debug, Clone)]
pub(super) struct Dial {
    pub(super) addr: String,
    pub(super) prover: Prover,
    pub(super) is_secret: bool,
    pub(super) hello: Hello,
    pub(super) number: ClientNumber,
    /// Where the server was before: if nobody listens there now, it is gone and not late.
    pub(super) met: Met,
    /// By what a try can be ended early.
    pub(super) reins: Option<Arc<Reins>>,
}

/// Where the server was met before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    /// Nowhere.
    NotYet,
    /// On this machine: nobody but its own system refuses a connection.
    Here,
    /// On another host: a firewall on the way may refuse, too.
    Elsewhere,
}

impl Met {
    /// By the addresses of a connection to it.
    pub(super) fn at(local: IpAddr, server: IpAddr) -> Met {
        if server.is_loopback() || server == local { Met::Here } else { Met::Elsewhere }
    }
}

/// How one try ended.
enum Missed {
    /// Try again.
    Retry(String),
    /// A server that was there before is not, or a firewall says so.
    Refused(io::Error),
    /// The host took the connection, and its server said nothing; try again.
    Frozen(String),
    /// The server closed at once without an answer.
    Closed,
    /// It will not get better.
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
            met: Met::NotYet,
            reins: None,
        }
    }

    fn was_there(&self) -> bool {
        self.met != Met::NotYet
    }

    /// What the first connection is for.
    pub(super) fn first_line(&self) -> Line {
        if self.hello.rank.is_some() { Line::Life } else { Line::Calls }
    }

    /// The same way for this purpose.
    pub(super) fn line(&self, line: Line) -> Dial {
        Dial { hello: self.hello.clone().note(&self.number.note(line)), ..self.clone() }
    }

    /// The same way as nobody's member.
    pub(super) fn as_guest(&self) -> Dial {
        let mut guest = self.clone();
        guest.hello.rank = None;
        guest
    }

    /// A connection that has been let in. A host that has been there is given up when it was silent for too long.
    pub(super) fn open(&self, deadline: Instant, silence: &Silence) -> Result<Wire, StoreError> {
        let mut tries = Tries::new(self, deadline)?;
        loop {
            if let Some(wire) = tries.round(silence)? {
                return Ok(wire);
            }
            let now = Instant::now();
            let end = silence.ends().filter(|_| self.was_there()).map_or(deadline, |end| end.min(deadline));
            let left = end.saturating_duration_since(now);
            if left.is_zero() {
                return Err(tries.given_up());
            }
            tries.remind(left);
            std::thread::sleep(tries.pause().min(left));
        }
    }

    /// A connection by the first of several ways on which the server proves the job key, tried in turn.
    pub(super) fn open_first(
        dials: Vec<Dial>,
        deadline: Instant,
        silence: &Silence,
    ) -> Result<Opened, StoreError> {
        let mut ways = Vec::new();
        for dial in &dials {
            ways.push(Way { tries: Tries::new(dial, deadline)?, rests_until: None });
        }
        loop {
            for (way, dial) in ways.iter_mut().zip(&dials) {
                if let Some(wire) = way.round(silence)? {
                    return Ok(Opened { wire, dial: dial.clone() });
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(not_on_any_port(ways));
            }
            let mut pause = PAUSES[1];
            for way in &mut ways {
                way.tries.remind(left);
                pause = pause.min(way.tries.pause());
            }
            std::thread::sleep(pause.min(left));
        }
    }

    /// One try at each address of the name, up to the first that is more than "not there".
    fn try_each(&self, deadline: Instant, reach: Duration) -> Vec<(String, Result<Wire, Missed>)> {
        let addrs = match self.addr.to_socket_addrs() {
            Ok(addrs) => addrs,
            Err(error) => {
                return vec![(self.addr.clone(), Err(Missed::Retry(format!("cannot be resolved: {error}"))))];
            }
        };
        let mut results = Vec::new();
        for addr in addrs {
            let result = self.try_one(addr, deadline, reach);
            let ends = !matches!(result, Err(Missed::Retry(_) | Missed::Frozen(_) | Missed::Refused(_)));
            results.push((addr.to_string(), result));
            if ends {
                break;
            }
        }
        results
    }

    fn try_one(&self, addr: SocketAddr, deadline: Instant, reach: Duration) -> Result<Wire, Missed> {
        if !self.is_secret && !addr.ip().is_loopback() {
            return Err(Missed::Final(StoreError::NeedsSecret { addr: addr.to_string() }));
        }
        let now = Instant::now();
        let patience = if self.was_there() { TRY_AGAIN } else { TRY };
        // A deadline that has passed still gets one honest try.
        let deadline = deadline.clamp(now + PAUSES[1], now + patience);
        let reach = reach.min(deadline - now);
        let mut stream = TcpStream::connect_timeout(&addr, reach).map_err(|source| match source.kind() {
            ErrorKind::ConnectionRefused if self.was_there() => Missed::Refused(source),
            _ => Missed::Retry(describe(&source, reach)),
        })?;
        if is_own_echo(&stream) {
            return Err(Missed::Retry(NOBODY.into()));
        }
        if let Some(reins) = &self.reins {
            reins.attach(&stream);
        }
        tune(&stream).map_err(|error| Missed::Retry(error.to_string()))?;
        let told = |error: HandshakeError| format!("took the connection, then: {error}");
        match connect_with(&mut stream, &self.prover, &self.hello, deadline) {
            Ok(session) => Ok(Wire::new(stream, &session)),
            Err(HandshakeError::Closed) if now.elapsed() < YOUNG => Err(Missed::Closed),
            Err(error @ HandshakeError::Timeout(_)) => Err(Missed::Frozen(told(error))),
            Err(error @ (HandshakeError::Closed | HandshakeError::Io(_))) => Err(Missed::Retry(told(error))),
            Err(source) => Err(Missed::Final(StoreError::Handshake { addr: addr.to_string(), source })),
        }
    }
}

/// A connection, and the way on which it came about.
pub(super) struct Opened {
    pub(super) wire: Wire,
    pub(super) dial: Dial,
}

/// One of several ways.
struct Way<'a> {
    tries: Tries<'a>,
    /// Not tried before that, since somebody else listens there.
    rests_until: Option<Instant>,
}

impl Way<'_> {
    /// As [`Tries::round`]; but whoever does not prove the job key is left alone for a while.
    fn round(&mut self, silence: &Silence) -> Result<Option<Wire>, StoreError> {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return Ok(None);
        }
        match self.tries.round(silence) {
            Err(StoreError::Handshake {
                addr,
                source: HandshakeError::Closed | HandshakeError::NotProved,
            }) => {
                self.tries.tried.note(addr, STRANGER.into());
                self.rests_until = Some(Instant::now() + REST);
                Ok(None)
            }
            other => other,
        }
    }
}

fn not_on_any_port(ways: Vec<Way<'_>>) -> StoreError {
    let (mut host, mut after, mut tried) = (String::new(), Duration::ZERO, Tried::default());
    for Way { tries, .. } in ways {
        let addr = &tries.dial.addr;
        host = addr.rsplit_once(':').map_or(addr.as_str(), |(host, _)| host).to_string();
        after = after.max(tries.began.elapsed());
        tried.append(tries.tried);
    }
    StoreError::NotOnAnyPort { host, after, tried }
}

/// The tries so far.
pub(super) struct Tries<'a> {
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

impl<'a> Tries<'a> {
    pub(super) fn new(dial: &'a Dial, deadline: Instant) -> Result<Tries<'a>, StoreError> {
        // A name that was known once is known again.
        if !dial.was_there() {
            resolve(&dial.addr, deadline)?;
        }
        let (began, tried) = (Instant::now(), Tried::default());
        let reminder = Reminder::new(began);
        Ok(Tries {
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

    /// One try at each address; `None`: try again after a [`pause`](Self::pause).
    pub(super) fn round(&mut self, silence: &Silence) -> Result<Option<Wire>, StoreError> {
        self.is_frozen = false;
        let reach = self.reach;
        self.reach = (reach * 2).min(if self.dial.was_there() { REACH_AGAIN } else { TRY });
        let (mut refused, mut is_only_refused) = (None, true);
        for (addr, result) in self.dial.try_each(self.deadline, reach) {
            is_only_refused &= matches!(result, Err(Missed::Refused(_)));
            match result {
                Ok(wire) => {
                    silence.broken();
                    return Ok(Some(wire));
                }
                Err(Missed::Final(error)) => return Err(error),
                Err(Missed::Closed) if self.is_unknown_there() => {
                    return Err(StoreError::Handshake { addr, source: HandshakeError::Closed });
                }
                Err(Missed::Closed) => {
                    self.closed += 1;
                    self.tried.note(addr, "closed the connection without an answer".into());
                }
                Err(Missed::Frozen(outcome)) => {
                    // The host lives; its process is another matter, for which each request has its own deadline.
                    silence.broken();
                    self.is_frozen = true;
                    self.tried.note(addr, outcome);
                }
                Err(Missed::Retry(outcome)) => {
                    silence.unreached(Instant::now());
                    self.tried.note(addr, outcome);
                }
                Err(Missed::Refused(source)) => {
                    self.tried.note(addr.clone(), NOBODY.into());
                    refused = Some((addr, source));
                }
            }
        }
        match refused {
            Some((addr, source)) if is_only_refused && self.is_gone(silence) => {
                Err(StoreError::Gone { addr, what: "connecting once more".into(), source })
            }
            _ => Ok(None),
        }
    }

    /// Whether one more refusal says that the server's process has ended.
    fn is_gone(&self, silence: &Silence) -> bool {
        let for_good = silence.is_refused_for_good(Instant::now());
        self.dial.met == Met::Here || for_good
    }

    /// Whether one more end without an answer says that the server does not know our job. One that knew it before has
    /// more time: a firewall may end each connection for a while.
    fn is_unknown_there(&self) -> bool {
        self.closed + 1 >= CLOSED && (!self.dial.was_there() || self.began.elapsed() > TRY)
    }

    /// How long to rest before the next round.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 3 / 2).min(PAUSES[1]);
        if self.is_frozen && self.dial.was_there() { FROZEN } else { pause }
    }

    fn remind(&mut self, left: Duration) {
        if self.reminder.is_due(Instant::now()) {
            let Dial { addr, hello, .. } = self.dial;
            let (rank, waited, tried) = (hello.rank, self.began.elapsed(), &self.tried);
            tracing::warn!(
                rank,
                addr,
                "{hello} still waits for the store at {addr}, {waited:.0?} so far and {left:.0?} more: {tried}"
            );
        }
    }

    fn given_up(self) -> StoreError {
        StoreError::Unreachable {
            addr: self.dial.addr.clone(),
            after: self.began.elapsed(),
            tried: self.tried,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Role;
    use crate::{ServerOptions, TcpStoreServer};

    /// A way to a server that was there before, and its port, where nobody listens now.
    fn refused(met: Met, key: &JobKey) -> (Dial, SocketAddr) {
        let server = TcpStoreServer::bind("127.0.0.1:0", key, ServerOptions::default()).unwrap();
        let addr = server.local_addr();
        let dial = Dial::new(&addr.to_string(), key, Hello::new(Role::Store));
        (Dial { met, ..dial.line(Line::Calls) }, addr)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn who_refuses_is_gone_at_once_here_and_after_a_while_elsewhere() {
        let (key, least) = (JobKey::random(), Duration::from_millis(1500));
        for (met, within) in [(Met::Here, least), (Met::Elsewhere, 2 * least)] {
            let (dial, _) = refused(met, &key);
            let (silence, began) = (Silence::new(Duration::from_secs(30)), Instant::now());
            let error = dial.open(soon(), &silence).unwrap_err();
            let took = began.elapsed();
            assert!(matches!(error, StoreError::Gone { .. }), "{met:?}: {error}");
            assert!(took < within && (took >= least) == (met == Met::Elsewhere), "{met:?}: {took:?}");
        }
    }

    #[test]
    fn a_firewall_that_refuses_for_a_moment_is_waited_for() {
        let key = JobKey::random();
        for met in [Met::Elsewhere, Met::Here] {
            let (dial, addr) = refused(met, &key);
            let again = std::thread::spawn({
                let key = key.clone();
                move || {
                    std::thread::sleep(Duration::from_millis(500));
                    TcpStoreServer::bind(addr, &key, ServerOptions::default()).unwrap()
                }
            });
            let silence = Silence::new(Duration::from_secs(30));
            // Calls that wait for less than that give up earlier, and the next one still counts from the first refusal.
            let short = dial.open(Instant::now() + Duration::from_millis(100), &silence);
            assert_eq!(
                matches!(short, Err(StoreError::Unreachable { .. })),
                met == Met::Elsewhere,
                "{met:?}"
            );
            assert_eq!(dial.open(soon(), &silence).is_ok(), met == Met::Elsewhere, "{met:?}");
            drop(again.join().unwrap());
        }
    }

    #[test]
    fn where_the_server_is_follows_from_both_addresses() {
        let at = |local: &str, server: &str| Met::at(local.parse().unwrap(), server.parse().unwrap());
        assert_eq!(at("127.0.0.1", "127.0.0.2"), Met::Here);
        assert_eq!(at("10.0.0.1", "10.0.0.1"), Met::Here);
        assert_eq!(at("10.0.0.1", "10.0.0.2"), Met::Elsewhere);
    }
}
