//! Proves that an agent's process has ended, without waiting for the host timeout.
//!
//! Each agent listens on a port until its process ends, and nothing is ever sent there. A watcher holds a connection to
//! that port. When the process ends, its kernel closes the connection. A network may close it too, so the proof is that
//! the port, which was reachable before, now refuses connections twice. Between hosts, a firewall may also refuse while
//! it loads its rules, so there the port must refuse for 1.5 s. While the host is silent, nothing is proved:
//!
//! ```text
//!   connection   port       process
//!   open         -          runs, or the host is silent
//!   closed       accepts    runs: the network broke the connection
//!   closed       refuses    has ended
//!   closed       silence    unknown
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

/// How often the connections are checked.
const POLL: Duration = Duration::from_millis(100);
/// Time limit for connecting to a host that answers.
const CONNECT: Duration = Duration::from_millis(250);
/// Time between attempts to connect to a silent host.
const RETRY: Duration = Duration::from_secs(1);
/// How many refusals in a row prove the end.
const REFUSALS: u32 = 2;
/// How long a port of another host must have refused.
const REFUSED: Duration = Duration::from_millis(1500);
/// More than the agents of any job: these connections are never accepted, so they stay in the kernel's queue.
const BACKLOG: i32 = 4096;

/// Opens the port that shows that this process runs.
pub(super) fn listen_at(ip: IpAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, 0))?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// The watched agents, with the addresses (`host:port`) of their ports.
pub(super) type Watched = BTreeMap<AgentId, String>;

/// Watches agents on its own thread, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct LivenessMonitor {
    to: Sender<Watched>,
    watched: Watched,
}

impl LivenessMonitor {
    /// Calls `report_death` for each agent whose end is proved, repeatedly until that agent is no longer watched.
    pub(super) fn start(report_death: impl FnMut(AgentId) + Send + 'static) -> Result<Self, LaunchError> {
        let (to, lists) = mpsc::channel();
        spawn("drumline-liveness", move || run(&lists, report_death))?;
        Ok(Self { to, watched: Watched::new() })
    }

    /// Replaces the list of watched agents.
    pub(super) fn set(&mut self, watched: Watched) {
        if self.watched != watched {
            self.watched.clone_from(&watched);
            // If the thread is gone, nothing is proved and only the host timeout decides.
            let _ = self.to.send(watched);
        }
    }
}

fn run(lists: &Receiver<Watched>, mut report_death: impl FnMut(AgentId)) {
    let mut processes = BTreeMap::<AgentId, WatchedProcess>::new();
    loop {
        match lists.recv_timeout(POLL) {
            Ok(watched) => {
                processes.retain(|id, process| watched.get(id) == Some(&process.address));
                for (id, address) in watched {
                    processes.entry(id).or_insert_with(|| WatchedProcess::at(address));
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for (id, process) in &mut processes {
            if process.has_ended(Instant::now()) {
                report_death(*id);
            }
        }
    }
}

/// One watched process.
struct WatchedProcess {
    address: String,
    connection: Option<TcpStream>,
    /// Where it ran when it was last reached; `None` if it never was.
    location: Option<Location>,
    refusals: Option<Refusals>,
    next_try: Option<Instant>,
}

/// On which machine a process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Location {
    ThisHost,
    OtherHost,
}

/// Refusals in a row.
#[derive(Debug, Clone, Copy)]
struct Refusals {
    first: Instant,
    last: Instant,
    count: u32,
}

impl Refusals {
    /// Adds one refusal to those `before`.
    fn add(before: Option<Refusals>, now: Instant) -> Self {
        let Refusals { first, count, .. } = before.unwrap_or(Self { first: now, last: now, count: 0 });
        Self { first, last: now, count: count + 1 }
    }

    fn prove_end(&self, location: Location) -> bool {
        let lasted = self.last.saturating_duration_since(self.first);
        self.count >= REFUSALS && (location == Location::ThisHost || lasted >= REFUSED)
    }
}

impl WatchedProcess {
    fn at(address: String) -> Self {
        Self { address, connection: None, location: None, refusals: None, next_try: None }
    }

    /// Whether it is proved that the process has ended.
    fn has_ended(&mut self, now: Instant) -> bool {
        if self.connection.as_ref().is_some_and(is_open) {
            return false;
        }
        self.connection = None;
        if self.next_try.is_none_or(|at| now >= at) {
            self.reconnect(now);
        }
        let refusals = self.refusals.zip(self.location);
        refusals.is_some_and(|(refusals, location)| refusals.prove_end(location))
    }

    fn reconnect(&mut self, now: Instant) {
        match connect(&self.address) {
            Ok(connection) => {
                self.location = Some(location_of(&connection));
                self.connection = Some(connection);
                self.refusals = None;
                self.next_try = None;
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                self.refusals = Some(Refusals::add(self.refusals, now));
                self.next_try = Some(now + CONNECT);
            }
            Err(_) => {
                self.refusals = None;
                self.next_try = Some(now + RETRY);
            }
        }
    }
}

fn connect(address: &str) -> io::Result<TcpStream> {
    let address = address.to_socket_addrs()?.next().ok_or(ErrorKind::NotFound)?;
    let connection = TcpStream::connect_timeout(&address, CONNECT)?;
    // Keepalive notices a process that ended while its host was silent.
    sockopt::set_socket_keepalive(&connection, true)?;
    sockopt::set_tcp_keepidle(&connection, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(&connection, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(&connection, 3)?;
    connection.set_nonblocking(true)?;
    Ok(connection)
}

/// On which machine the other end of a connection runs.
fn location_of(connection: &TcpStream) -> Location {
    match (connection.local_addr(), connection.peer_addr()) {
        (_, Ok(peer)) if peer.ip().is_loopback() => Location::ThisHost,
        (Ok(local), Ok(peer)) if local.ip() == peer.ip() => Location::ThisHost,
        _ => Location::OtherHost,
    }
}

/// Whether an idle connection is still open.
fn is_open(connection: &TcpStream) -> bool {
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
    fn refusals_prove_the_end_only_of_a_process_that_was_reached() {
        let (deaths, reported) = mpsc::channel();
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let never = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
        let watched = Watched::from([(AgentId(1), address(&listener)), (AgentId(2), address(&never))]);
        drop(never);
        let mut monitor = LivenessMonitor::start(move |id| deaths.send(id).unwrap_or_default()).unwrap();
        monitor.set(watched);
        assert!(
            reported.recv_timeout(Duration::from_secs(1)).is_err(),
            "one runs, the other was never reached"
        );
        drop(listener);
        assert_eq!(reported.recv_timeout(SOON), Ok(AgentId(1)));
        assert_eq!(reported.recv_timeout(SOON), Ok(AgentId(1)), "repeatedly");
        monitor.set(Watched::new());
        drop(monitor);
        assert!(reported.iter().all(|id| id == AgentId(1)));
    }

    #[test]
    fn a_connection_that_the_network_broke_proves_nothing() {
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let mut process = WatchedProcess::at(listener.local_addr().unwrap().to_string());
        assert!(!process.has_ended(Instant::now()) && process.connection.is_some());
        drop(listener.accept().unwrap());
        let until = Instant::now() + SOON;
        while process.connection.as_ref().is_some_and(is_open) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!process.has_ended(Instant::now()), "it connects again");
        assert!(process.connection.as_ref().is_some_and(is_open));
    }

    /// How long after its port closed a process at this `location` counts as ended, within three seconds. With
    /// `reopened_at` the port opens again at that time.
    fn ended_after(location: Location, reopened_at: Option<Duration>) -> Option<Duration> {
        let listener = listen_at(Ipv4Addr::LOCALHOST.into()).unwrap();
        let address = listener.local_addr().unwrap();
        let mut process = WatchedProcess::at(address.to_string());
        let began = Instant::now();
        assert!(
            !process.has_ended(began) && process.location == Some(Location::ThisHost),
            "loopback is this host"
        );
        process.location = Some(location);
        drop(listener);
        let mut open = Vec::new();
        // The test counts the time itself.
        (0..30).map(|poll| poll * POLL).find(|time| {
            if reopened_at == Some(*time) {
                open.push(TcpListener::bind(address).unwrap());
            }
            process.has_ended(began + *time)
        })
    }

    #[test]
    fn another_host_must_refuse_for_a_while() {
        let at_once = ended_after(Location::ThisHost, None).unwrap();
        assert!(at_once < Duration::from_millis(500), "{at_once:?}");
        let later = ended_after(Location::OtherHost, None).unwrap();
        assert!(later >= REFUSED && later < Duration::from_secs(2), "{later:?}");
        let moment = Duration::from_millis(700);
        assert_eq!(ended_after(Location::OtherHost, Some(moment)), None, "a firewall refused for a moment");
        assert!(
            ended_after(Location::ThisHost, Some(moment)).is_some(),
            "control: on this host no firewall refuses"
        );
    }
}
