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
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
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
    /// The server was there before: if nobody listens now, it is gone and not late.
    pub(super) was_there: bool,
    /// By what a try can be ended early.
    pub(super) reins: Option<Arc<Reins>>,
}

/// How one try ended.
enum Missed {
    /// Try again.
    Retry(String),
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
            was_there: false,
            reins: None,
        }
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
            let end = silence.ends().filter(|_| self.was_there).map_or(deadline, |end| end.min(deadline));
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
            let ends = !matches!(result, Err(Missed::Retry(_) | Missed::Frozen(_)));
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
        let patience = if self.was_there { TRY_AGAIN } else { TRY };
        // A deadline that has passed still gets one honest try.
        let deadline = deadline.clamp(now + PAUSES[1], now + patience);
        let reach = reach.min(deadline - now);
        let mut stream = TcpStream::connect_timeout(&addr, reach).map_err(|source| match source.kind() {
            ErrorKind::ConnectionRefused if self.was_there => Missed::Final(StoreError::Gone {
                addr: addr.to_string(),
                what: "connecting once more".into(),
                source,
            }),
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
        if !dial.was_there {
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
        self.reach = (reach * 2).min(if self.dial.was_there { REACH_AGAIN } else { TRY });
        for (addr, result) in self.dial.try_each(self.deadline, reach) {
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
                    silence.noticed(Instant::now());
                    self.tried.note(addr, outcome);
                }
            }
        }
        Ok(None)
    }

    /// Whether one more end without an answer says that the server does not know our job. One that knew it before has
    /// more time: a firewall may end each connection for a while.
    fn is_unknown_there(&self) -> bool {
        self.closed + 1 >= CLOSED && (!self.dial.was_there || self.began.elapsed() > TRY)
    }

    /// How long to rest before the next round.
    pub(super) fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 3 / 2).min(PAUSES[1]);
        if self.is_frozen && self.dial.was_there { FROZEN } else { pause }
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
