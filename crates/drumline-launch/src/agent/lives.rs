//! Proof that an agent's process has ended, without waiting for the host timeout.
//!
//! Each agent listens on a port for as long as its process lives, and nobody speaks there. Whoever watches it holds a
//! connection to that port. When the process ends, its kernel ends the connection; and as a network may do that too, the proof is
//! that the port, which could be reached before, now refuses connections, twice. Between hosts a firewall may refuse, too, for
//! as long as it takes to load its rules: there the port must refuse for 1.5 s. Nothing is proved while the host is silent:
//!
//! ```text
//!   connection   port       process
//!   stands       -          lives, or the host is silent
//!   ended        connects   lives: the network broke the connection
//!   ended        refuses    has ended
//!   ended        silence    nobody knows
//! ```

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::net::{listen, sockopt};

use super::control::spawn;
use crate::LaunchError;
use crate::membership::AgentId;

/// Time between looks at the connections.
const LOOK: Duration = Duration::from_millis(100);
/// Time for a connection to a host that answers.
const CONNECT: Duration = Duration::from_millis(250);
/// Time between tries at a host that is silent.
const RETRY: Duration = Duration::from_secs(1);
/// So many refusals in a row are a proof.
const REFUSALS: u32 = 2;
/// For so long a port of another host must have refused.
const REFUSED: Duration = Duration::from_millis(1500);
/// More than the agents of any job: nobody takes these connections out of the system's queue.
const BACKLOG: i32 = 4096;

/// Listens for as long as this process lives.
pub(super) fn listen_at(ip: IpAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, 0))?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// The agents to be watched, with the addresses (`host:port`) of their ports.
pub(super) type Watched = BTreeMap<AgentId, String>;

/// Watches agents on a thread of its own, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Lives {
    to: Sender<Watched>,
    watched: Watched,
}

impl Lives {
    /// `tell` hears of each agent that is proved dead, again and again until it is no longer watched.
    pub(super) fn watch(tell: impl FnMut(AgentId) + Send + 'static) -> Result<Self, LaunchError> {
        let (to, lists) = mpsc::channel();
        spawn("drumline-lives", move || run(&lists, tell))?;
        Ok(Self { to, watched: Watched::new() })
    }

    /// From now on these are watched, and nobody else.
    pub(super) fn set(&mut self, watched: Watched) {
        if self.watched != watched {
            self.watched.clone_from(&watched);
            // Without its thread nothing is proved, and silence counts.
            let _ = self.to.send(watched);
        }
    }
}

fn run(lists: &Receiver<Watched>, mut tell: impl FnMut(AgentId)) {
    let mut lives = BTreeMap::<AgentId, Life>::new();
    loop {
        match lists.recv_timeout(LOOK) {
            Ok(watched) => {
                lives.retain(|id, life| watched.get(id) == Some(&life.address));
                for (id, address) in watched {
                    lives.entry(id).or_insert_with(|| Life::at(address));
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for (id, life) in &mut lives {
            if life.is_over(Instant::now()) {
                tell(*id);
            }
        }
    }
}

/// One process that is watched.
struct Life {
    address: String,
    connection: Option<TcpStream>,
    /// Where it was when it could be reached.
    was_there: Option<Side>,
    refusals: Option<Refusals>,
    next_try: Option<Instant>,
}

/// On which machine a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Here,
    Elsewhere,
}

/// Refusals in a row.
#[derive(Debug, Clone, Copy)]
struct Refusals {
    first: Instant,
    last: Instant,
    number: u32,
}

impl Refusals {
    /// One more, after those `before`.
    fn and(before: Option<Refusals>, now: Instant) -> Self {
        let Refusals { first, number, .. } = before.unwrap_or(Self { first: now, last: now, number: 0 });
        Self { first, last: now, number: number + 1 }
    }

    fn prove_the_end_of(&self, side: Side) -> bool {
        let lasted = self.last.saturating_duration_since(self.first);
        self.number >= REFUSALS && (side == Side::Here || lasted >= REFUSED)
    }
}

impl Life {
    fn at(address: String) -> Self {
        Self { address, connection: None, was_there: None, refusals: None, next_try: None }
    }

    /// Whether its end is proved.
    fn is_over(&mut self, now: Instant) -> bool {
        if self.connection.as_ref().is_some_and(stands) {
            return false;
        }
        self.connection = None;
        if self.next_try.is_none_or(|at| now >= at) {
            self.try_again(now);
        }
        let refusals = self.refusals.zip(self.was_there);
        refusals.is_some_and(|(refusals, side)| refusals.prove_the_end_of(side))
    }

    fn try_again(&mut self, now: Instant) {
        match connect(&self.address) {
            Ok(connection) => {
                self.was_there = Some(side_of(&connection));
                (self.connection, self.refusals, self.next_try) = (Some(connection), None, None);
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                self.refusals = Some(Refusals::and(self.refusals, now));
                self.next_try = Some(now + CONNECT);
            }
            Err(_) => (self.refusals, self.next_try) = (None, Some(now + RETRY)),
        }
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let address = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
    let connection = TcpStream::connect_timeout(&address, CONNECT)?;
    // So that the end of a process is noticed that came while the host was silent.
    sockopt::set_socket_keepalive(&connection, true)?;
    sockopt::set_tcp_keepidle(&connection, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(&connection, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(&connection, 3)?;
    connection.set_nonblocking(true)?;
    Ok(connection)
}

/// On which machine the other end of a connection is.
fn side_of(connection: &TcpStream) -> Side {
    match (connection.local_addr(), connection.peer_addr()) {
        (_, Ok(peer)) if peer.ip().is_loopback() => Side::Here,
        (Ok(local), Ok(peer)) if local.ip() == peer.ip() => Side::Here,
        _ => Side::Elsewhere,
    }
}

/// Whether a connection on which nobody speaks has not ended.
fn stands(connection: &TcpStream) -> bool {
    match connection.peek(&mut [0]) {
        Ok(read) => read > 0,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn an_end_is_proved_by_refusals_and_only_of_one_who_was_there() {
        let (deaths, heard) = mpsc::channel();
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let never = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let watched = Watched::from([(AgentId(1), address(&listener)), (AgentId(2), address(&never))]);
        drop(never);
        let mut lives = Lives::watch(move |id| deaths.send(id).unwrap_or_default()).unwrap();
        lives.set(watched);
        assert!(heard.recv_timeout(Duration::from_secs(1)).is_err(), "one lives, the other was never there");
        drop(listener);
        assert_eq!(heard.recv_timeout(SOON), Ok(AgentId(1)));
        assert_eq!(heard.recv_timeout(SOON), Ok(AgentId(1)), "again and again");
        lives.set(Watched::new());
        drop(lives);
        assert!(heard.iter().all(|id| id == AgentId(1)));
    }

    #[test]
    fn a_connection_that_the_network_broke_proves_nothing() {
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let mut life = Life::at(listener.local_addr().unwrap().to_string());
        assert!(!life.is_over(Instant::now()) && life.connection.is_some());
        drop(listener.accept().unwrap());
        let until = Instant::now() + SOON;
        while life.connection.as_ref().is_some_and(stands) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!life.is_over(Instant::now()), "it connects again");
        assert!(life.connection.as_ref().is_some_and(stands));
    }

    /// How long after its port was closed a life of this `side` is over, looked at for three seconds; with `back` the port
    /// is open again from then on.
    fn over_after(side: Side, back: Option<Duration>) -> Option<Duration> {
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = listener.local_addr().unwrap();
        let mut life = Life::at(address.to_string());
        let began = Instant::now();
        assert!(!life.is_over(began) && life.was_there == Some(Side::Here), "loopback is here");
        life.was_there = Some(side);
        drop(listener);
        let mut open = Vec::new();
        // The clock is the test's own.
        (0..30).map(|look| look * LOOK).find(|time| {
            if back == Some(*time) {
                open.push(TcpListener::bind(address).unwrap());
            }
            life.is_over(began + *time)
        })
    }

    #[test]
    fn another_host_must_refuse_for_a_while() {
        let at_once = over_after(Side::Here, None).unwrap();
        assert!(at_once < Duration::from_millis(500), "{at_once:?}");
        let later = over_after(Side::Elsewhere, None).unwrap();
        assert!(later >= REFUSED && later < Duration::from_secs(2), "{later:?}");
        let moment = Duration::from_millis(700);
        assert_eq!(over_after(Side::Elsewhere, Some(moment)), None, "a firewall refused for a moment");
        assert!(over_after(Side::Here, Some(moment)).is_some(), "control: here nobody else refuses");
    }
}
