//! Where new connections wait until they have proved the job key: a listener, and a bounded number of strangers.
//!
//! ```text
//!  accept ── wrong first bytes ─▶ closed, nothing kept
//!     ├─ nothing yet ─▶ silent (at most 256, 5 s) ─┐
//!     └─ the job's tag ────────────────────────────┴▶ shown (at most 1024, 5 s) ── proved ─▶ Knock ─▶ the store's server, a Gate
//!          full: of the address that has most of them, the oldest goes; silent ones never push out one that has shown the tag
//! ```
//! A member sends its first bytes together with the connection, so they are most often there when it is taken: under a
//! flood it does not wait in one line with those that say nothing. One address can fill a place only as long as nobody
//! else wants in: whoever comes from another takes its share, and all ranks of a host may still come at once. Nobody is
//! dropped before a moment has passed, since a member may need one.
//!
//! Sockets report a change once (edge triggered), so an accept that stops early notes down when to go on (`accept_at`).
//! Tokens are given out in order and never twice: the oldest stranger is the first in its map, and an event for one that
//! is gone finds nobody. Not here: the thread and its waiting, which are the owner's.

mod crowd;
mod gate;
mod stranger;

pub use gate::{Gate, Host};
pub(crate) use stranger::Stranger;

use crate::handshake::{Hello, Prover, Refusal, Session, YOUNG};
use crowd::Crowd;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use stranger::Progress;

/// The owner's waker.
pub(crate) const WAKE: Token = Token(0);
/// The listener.
pub(crate) const LISTEN: Token = Token(1);

/// Strangers held at a time that have said nothing, or not enough.
const MAX_SILENT: usize = 256;
/// Those that have shown the job's tag: members, or somebody who has seen one come.
const MAX_SHOWN: usize = 1024;
/// Time in which a silent one is not dropped for another.
const MOMENT: Duration = Duration::from_millis(10);
/// Time for the whole handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// Rest after the system had no descriptor left for a new connection.
const REST: Duration = Duration::from_millis(100);
/// Connections taken before the others have their turn.
const ACCEPTS: usize = 512;

pub(crate) struct Doorstep {
    listener: TcpListener,
    registry: Registry,
    prover: Prover,
    silent: Crowd,
    shown: Crowd,
    last_token: usize,
    /// When to take new connections again; `None`: when the listener says there are any.
    accept_at: Option<Instant>,
}

/// A stranger that holds the key, and has neither been let in nor refused; its token stays registered.
pub(crate) struct Proved {
    pub(crate) token: usize,
    pub(crate) stranger: Stranger,
    pub(crate) hello: Hello,
    pub(crate) session: Session,
}

/// What a stranger has come to.
pub(crate) enum Knock {
    /// It holds the key.
    Proved(Box<Proved>),
    /// It holds the key, cannot be understood, and has been told so.
    Refused(Refusal),
}

impl Doorstep {
    pub(crate) fn new(
        listener: std::net::TcpListener,
        prover: Prover,
        registry: Registry,
    ) -> io::Result<Self> {
        let mut listener = TcpListener::from_std(listener);
        registry.register(&mut listener, LISTEN, Interest::READABLE)?;
        let (silent, shown) = (Crowd::new(MAX_SILENT, MOMENT), Crowd::new(MAX_SHOWN, YOUNG));
        Ok(Doorstep { listener, registry, prover, silent, shown, last_token: LISTEN.0, accept_at: None })
    }

    /// When something has to be done though no socket has changed.
    pub(crate) fn next_turn(&self) -> Option<Instant> {
        let first = [&self.silent, &self.shown].map(|crowd| crowd.oldest().map(|since| since + PATIENCE));
        first.into_iter().chain([self.accept_at]).flatten().min()
    }

    /// The listener has changed.
    pub(crate) fn ring(&mut self) {
        self.accept_at = Some(Instant::now());
    }

    /// A connection has changed: goes on with its handshake, if it is a stranger's.
    pub(crate) fn serve(&mut self, token: usize) -> Option<Knock> {
        let mut stranger = self.silent.take(token).or_else(|| self.shown.take(token))?;
        match stranger.advance(&self.prover) {
            Progress::Waiting => {
                self.keep(token, stranger);
                None
            }
            Progress::Gone => None,
            Progress::Refused(refusal) => Some(Knock::Refused(refusal)),
            Progress::Proved(hello, session) => {
                Some(Knock::Proved(Box::new(Proved { token, stranger: *stranger, hello, session })))
            }
        }
    }

    /// Drops those whose time is up and takes new connections.
    pub(crate) fn turn(&mut self, now: Instant) {
        for crowd in [&mut self.silent, &mut self.shown] {
            crowd.drop_since(now.checked_sub(PATIENCE));
        }
        // A stranger that proved itself or went away makes room before the time is up.
        if self.accept_at.is_some_and(|at| at <= now || self.has_room()) {
            self.accept_at = self.accept(now);
        }
    }

    fn has_room(&self) -> bool {
        !self.silent.is_full() && !self.shown.is_full()
    }

    /// Takes new connections, one turn's worth; says when to go on if there may be more.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPTS {
            let room_at =
                [&self.silent, &self.shown].map(|crowd| crowd.room_at()).into_iter().flatten().max();
            if let Some(at) = room_at
                && at > now
            {
                return Some(at);
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.greet(stream, from, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_out_of_descriptors(&error) => {
                    if !raise_limit() && !self.silent.drop_one(now) && !self.shown.drop_one(now) {
                        tracing::debug!(%error, "no descriptor for a new connection; try a higher `ulimit -n`");
                        return Some(now + REST);
                    }
                }
                // The connection went away before it was taken.
                Err(_) => {}
            }
        }
        Some(now)
    }

    /// Reads what it has sent already: whoever begins with the wrong bytes is dropped before it takes a place.
    fn greet(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        let mut stranger = Box::new(Stranger::new(stream, from.ip(), now));
        if !matches!(stranger.open(&self.prover), Progress::Waiting) {
            return;
        }
        self.last_token += 1;
        let both = Interest::READABLE | Interest::WRITABLE;
        // What comes from now on is an event of its socket, and so is what came since it was read.
        if self.registry.register(&mut stranger.stream, Token(self.last_token), both).is_ok() {
            self.keep(self.last_token, stranger);
        }
    }

    fn keep(&mut self, token: usize, stranger: Box<Stranger>) {
        let crowd = if stranger.has_shown_tag() { &mut self.shown } else { &mut self.silent };
        crowd.add(token, stranger);
    }
}

/// More descriptors from the system, if it has any for us.
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
