//! Pending connections: those that have not proved the job key yet. A listener, and a bounded number of connections.
//!
//! ```text
//!  accept ── wrong first bytes ─▶ closed, nothing kept
//!     ├─ nothing yet ─▶ silent (at most 256, 5 s) ─┐
//!     └─ the job's tag ────────────────────────────┴▶ tagged (at most 1024, 5 s) ── proved ─▶ the server, a Gate
//!          full: the oldest of the address with the most connections is dropped; silent ones never displace tagged
//! ```
//! A member sends its first bytes together with the connection, so they have usually arrived when it is accepted. So
//! during a flood it does not wait behind silent connections. One address can fill all places only as long as no other
//! wants in: connections from another address take their share, and all ranks of a host may still connect at once. No
//! connection is dropped before a moment has passed, since a member may need one.
//!
//! Sockets report a change once (edge triggered), so an accept that stops early records when to continue (`accept_at`).
//! Tokens are assigned in order and never reused: the oldest connection is the first in its map, and an event for a
//! dropped one is ignored. Not here: the thread and its waiting, which belong to the owner.

mod connection;
mod gate;
mod set;

pub(crate) use connection::PendingConnection;
pub use gate::{Gate, Host};

use crate::handshake::{Hello, Prover, Refusal, Session, YOUNG};
use connection::Progress;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use set::PendingSet;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The owner's waker.
pub(crate) const WAKE: Token = Token(0);
/// The listener.
pub(crate) const LISTEN: Token = Token(1);

/// The most connections that have sent nothing, or not enough.
const MAX_SILENT: usize = 256;
/// The most connections that have sent the job's tag: members, or someone who has seen a member connect.
const MAX_TAGGED: usize = 1024;
/// A silent connection is not dropped for another within this time.
const MOMENT: Duration = Duration::from_millis(10);
/// Time limit of the whole handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after the system had no descriptor left for a new connection.
const PAUSE: Duration = Duration::from_millis(100);
/// How many connections are accepted before the others get their turn.
const ACCEPTS: usize = 512;

pub(crate) struct PendingConnections {
    listener: TcpListener,
    registry: Registry,
    prover: Prover,
    silent: PendingSet,
    tagged: PendingSet,
    last_token: usize,
    /// When to accept new connections again; `None` means when the listener reports some.
    accept_at: Option<Instant>,
}

/// A connection that has proved the key, and is neither admitted nor refused yet; its token stays registered.
pub(crate) struct Authenticated {
    pub(crate) token: usize,
    pub(crate) connection: PendingConnection,
    pub(crate) hello: Hello,
    pub(crate) session: Session,
}

/// The result of a handshake.
pub(crate) enum HandshakeResult {
    /// The client has proved the key.
    Authenticated(Box<Authenticated>),
    /// The client has proved the key, but its version differs; it was sent this refusal.
    Refused(Refusal),
}

impl PendingConnections {
    pub(crate) fn new(
        listener: std::net::TcpListener,
        prover: Prover,
        registry: Registry,
    ) -> io::Result<Self> {
        let mut listener = TcpListener::from_std(listener);
        registry.register(&mut listener, LISTEN, Interest::READABLE)?;
        let silent = PendingSet::new(MAX_SILENT, MOMENT);
        let tagged = PendingSet::new(MAX_TAGGED, YOUNG);
        Ok(PendingConnections {
            listener,
            registry,
            prover,
            silent,
            tagged,
            last_token: LISTEN.0,
            accept_at: None,
        })
    }

    /// When something is due without an event of a socket.
    pub(crate) fn next_turn(&self) -> Option<Instant> {
        let first =
            [&self.silent, &self.tagged].map(|set| set.oldest().map(|since| since + HANDSHAKE_TIMEOUT));
        first.into_iter().chain([self.accept_at]).flatten().min()
    }

    /// The listener has reported a change.
    pub(crate) fn listener_changed(&mut self) {
        self.accept_at = Some(Instant::now());
    }

    /// A connection has reported a change: continues its handshake, if it is pending.
    pub(crate) fn serve(&mut self, token: usize) -> Option<HandshakeResult> {
        let mut connection = self.silent.take(token).or_else(|| self.tagged.take(token))?;
        match connection.advance(&self.prover) {
            Progress::Waiting => {
                self.keep(token, connection);
                None
            }
            Progress::Gone => None,
            Progress::Refused(refusal) => Some(HandshakeResult::Refused(refusal)),
            Progress::Proved(hello, session) => {
                let authenticated = Authenticated { token, connection: *connection, hello, session };
                Some(HandshakeResult::Authenticated(Box::new(authenticated)))
            }
        }
    }

    /// Drops the connections whose time is up, and accepts new ones.
    pub(crate) fn turn(&mut self, now: Instant) {
        for set in [&mut self.silent, &mut self.tagged] {
            set.drop_since(now.checked_sub(HANDSHAKE_TIMEOUT));
        }
        // A connection that proved the key or ended makes room earlier.
        if self.accept_at.is_some_and(|at| at <= now || self.has_room()) {
            self.accept_at = self.accept(now);
        }
    }

    fn has_room(&self) -> bool {
        !self.silent.is_full() && !self.tagged.is_full()
    }

    /// Accepts new connections, one turn's worth. Returns when to continue, if there may be more.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPTS {
            let room_at = [&self.silent, &self.tagged].map(|set| set.room_at()).into_iter().flatten().max();
            if let Some(at) = room_at
                && at > now
            {
                return Some(at);
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.greet(stream, from, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_out_of_descriptors(&error) => {
                    if !raise_limit() && !self.silent.drop_one(now) && !self.tagged.drop_one(now) {
                        tracing::debug!(%error, "no descriptor for a new connection; try a higher `ulimit -n`");
                        return Some(now + PAUSE);
                    }
                }
                // The connection ended before it was accepted.
                Err(_) => {}
            }
        }
        Some(now)
    }

    /// Reads what the client has already sent: a connection with the wrong first bytes is dropped before it takes a
    /// place.
    fn greet(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        let mut connection = Box::new(PendingConnection::new(stream, from.ip(), now));
        if !matches!(connection.open(&self.prover), Progress::Waiting) {
            return;
        }
        self.last_token += 1;
        let both = Interest::READABLE | Interest::WRITABLE;
        // What arrives from now on is an event of its socket, and so is what arrived since the read above.
        if self.registry.register(&mut connection.stream, Token(self.last_token), both).is_ok() {
            self.keep(self.last_token, connection);
        }
    }

    fn keep(&mut self, token: usize, connection: Box<PendingConnection>) {
        let set = if connection.is_tagged() { &mut self.tagged } else { &mut self.silent };
        set.add(token, connection);
    }
}

/// Raises the limit of open files, if the system allows it.
fn raise_limit() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    limit.current < limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok()
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let full = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| full.contains(&errno))
}
