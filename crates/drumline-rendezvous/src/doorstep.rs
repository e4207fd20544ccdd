//! Where new connections wait until they have proved the job key: a listener, and a bounded number of strangers.
//!
//! ```text
//!  accept ─▶ strangers (at most 256, 5 s, 58 bytes at first) ── proved ─▶ Knock ─▶ the store's server, a Gate
//!               │ full: of the address that has most of them, the oldest goes
//!               ▼ closed, nothing changed
//! ```
//! So one address can fill the place only as long as nobody else wants in: whoever comes from another takes its share,
//! and all ranks of a host may still come at once. None is dropped young, since a member needs a moment to answer.
//!
//! Sockets report a change once (edge triggered), so an accept that stops early notes down when to go on (`accept_at`).
//! Tokens are given out in order and never twice: the oldest stranger is the first in the map, and an event for one that
//! is gone finds nobody. Not here: the thread and its waiting, which are the owner's.

mod gate;
mod stranger;

pub use gate::{Gate, Host};
pub(crate) use stranger::Stranger;

use crate::handshake::{Hello, Prover, Refusal, Session, YOUNG};
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use stranger::Progress;

/// The owner's waker.
pub(crate) const WAKE: Token = Token(0);
/// The listener.
pub(crate) const LISTEN: Token = Token(1);

/// Strangers held at a time.
const MAX_STRANGERS: usize = 256;
/// Time for the whole handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// Rest after the system had no descriptor left for a new connection.
const REST: Duration = Duration::from_millis(100);
/// Connections taken before the others have their turn.
const ACCEPTS: usize = 64;

pub(crate) struct Doorstep {
    listener: TcpListener,
    registry: Registry,
    prover: Prover,
    strangers: BTreeMap<usize, Box<Stranger>>,
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
        let (strangers, last_token) = (BTreeMap::new(), LISTEN.0);
        Ok(Doorstep { listener, registry, prover, strangers, last_token, accept_at: None })
    }

    /// When something has to be done though no socket has changed.
    pub(crate) fn next_turn(&self) -> Option<Instant> {
        let first = self.strangers.values().next().map(|stranger| stranger.since + PATIENCE);
        [first, self.accept_at].into_iter().flatten().min()
    }

    /// The listener has changed.
    pub(crate) fn ring(&mut self) {
        self.accept_at = Some(Instant::now());
    }

    /// A connection has changed: goes on with its handshake, if it is a stranger's.
    pub(crate) fn serve(&mut self, token: usize) -> Option<Knock> {
        match self.strangers.get_mut(&token)?.advance(&self.prover) {
            Progress::Waiting => None,
            Progress::Gone => {
                self.strangers.remove(&token);
                None
            }
            Progress::Refused(refusal) => {
                self.strangers.remove(&token);
                Some(Knock::Refused(refusal))
            }
            Progress::Proved(hello, session) => {
                let stranger = *self.strangers.remove(&token)?;
                Some(Knock::Proved(Box::new(Proved { token, stranger, hello, session })))
            }
        }
    }

    /// Drops those whose time is up and takes new connections.
    pub(crate) fn turn(&mut self, now: Instant) {
        while let Some(oldest) = self.strangers.first_entry()
            && oldest.get().since + PATIENCE <= now
        {
            oldest.remove();
        }
        // A stranger that proved itself or went away makes room before the time is up.
        if self.accept_at.is_some_and(|at| at <= now || self.strangers.len() < MAX_STRANGERS) {
            self.accept_at = self.accept(now);
        }
    }

    /// Takes new connections, one turn's worth; says when to go on if there may be more.
    fn accept(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..ACCEPTS {
            if self.strangers.len() >= MAX_STRANGERS
                && let Some((_, grown_up)) = self.first_to_go()
                && grown_up > now
            {
                return Some(grown_up);
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.greet(stream, from, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_out_of_descriptors(&error) => {
                    if !raise_limit() && !self.drop_grown_up(now) {
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

    /// Who would make room for another, and when it may.
    fn first_to_go(&self) -> Option<(usize, Instant)> {
        let token = first_to_go(self.strangers.iter().map(|(token, stranger)| (*token, stranger.from)))?;
        Some((token, self.strangers.get(&token)?.since + YOUNG))
    }

    /// One stranger less, if it has had its moment.
    fn drop_grown_up(&mut self, now: Instant) -> bool {
        let token = self.first_to_go().filter(|(_, grown_up)| *grown_up <= now);
        token.is_some_and(|(token, _)| self.strangers.remove(&token).is_some())
    }

    /// What it has sent already is the first event of its socket.
    fn greet(&mut self, mut stream: TcpStream, from: SocketAddr, now: Instant) {
        self.last_token += 1;
        let both = Interest::READABLE | Interest::WRITABLE;
        if self.strangers.len() >= MAX_STRANGERS {
            self.drop_grown_up(now);
        }
        if self.registry.register(&mut stream, Token(self.last_token), both).is_ok() {
            self.strangers.insert(self.last_token, Box::new(Stranger::new(stream, from.ip(), now)));
        }
    }
}

/// Who makes room for another, of strangers in the order they came: the oldest of the address that has most of them.
fn first_to_go(strangers: impl Iterator<Item = (usize, IpAddr)>) -> Option<usize> {
    let mut by_address: HashMap<IpAddr, (usize, usize)> = HashMap::new();
    for (token, from) in strangers {
        by_address.entry(from).or_insert((0, token)).0 += 1;
    }
    let most = by_address.into_values().max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
    most.map(|(_, oldest)| oldest)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn from(hosts: &[u8]) -> impl Iterator<Item = (usize, IpAddr)> {
        hosts.iter().enumerate().map(|(token, host)| (token, IpAddr::from([10, 0, 0, *host])))
    }

    #[test]
    fn the_address_with_most_strangers_makes_room() {
        assert_eq!(first_to_go(from(&[])), None);
        assert_eq!(first_to_go(from(&[1, 1, 1])), Some(0), "all of one: the oldest");
        assert_eq!(first_to_go(from(&[1, 2, 2])), Some(1), "not the oldest of all");
        assert_eq!(first_to_go(from(&[1, 2, 2, 1])), Some(0), "as many: the older");
    }

    #[test]
    fn a_flood_from_one_address_pushes_out_none_of_another() {
        let mut held: BTreeMap<usize, IpAddr> = from(&[1, 2, 3]).collect();
        for token in 3..10_000 {
            if held.len() == MAX_STRANGERS {
                let goes = first_to_go(held.iter().map(|(token, from)| (*token, *from))).unwrap();
                held.remove(&goes);
            }
            held.insert(token, [10, 0, 0, 9].into());
        }
        assert!((0..3).all(|token| held.contains_key(&token)));
        assert_eq!(held.keys().next_back(), Some(&9_999), "and the newest is always taken");
    }

    #[test]
    fn a_stranger_is_a_few_hundred_bytes() {
        assert!(size_of::<Stranger>() <= 1024, "{} bytes", size_of::<Stranger>());
    }
}
