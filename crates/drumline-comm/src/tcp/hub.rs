//! Where links begin: one listener per process, and the incoming links that wait to be claimed.
//!
//! The hub listens only on the address by which this process is known. A connection must first prove the job's key, at a
//! [`Gate`] that holds strangers in a few hundred bytes each, and say which link it is. A link for another rank, or one that is
//! protected in another way than this rank expects, is refused. Unclaimed links of a group end with it.
//!
//! The connecting side is the last to learn whether it was accepted, and connects again if that answer is lost. So it confirms a
//! new link with one byte, and until then nobody can claim the link: both sides agree on which connection it is.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drumline_rendezvous::handshake::{HandshakeError, Session};
use drumline_rendezvous::{
    Cause, Gate, Hello, Host, JobKey, Refusal, Role, StoreError, handshake, worker_env,
};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::Timespec;
use rustix::net::sockopt;

use super::name::{LinkName, LinkNote};
use super::record::MAX_BURST;
use super::security::LinkSecurity;

/// How long one handshake may take.
const PROOF_TIME: Duration = Duration::from_secs(2);

/// How long one attempt to reconnect may take. It is short, so that the caller soon learns of a rank that has died.
const ATTEMPT: Duration = Duration::from_millis(500);

/// How many ended groups are remembered: enough for links that were on their way when their group ended.
const REMEMBERED: usize = 1024;

/// The first byte that the connecting side sends over a link, once it knows that it was accepted.
const CONFIRMED: u8 = 1;

/// Time between two probes of a silent host, if it is waited for long enough for six of them.
const PROBE: Duration = Duration::from_secs(5);

/// The kernel's limit on probes.
const MAX_PROBES: u64 = 127;

/// Bytes that may be on their way on a link in each direction.
const SOCKET_BUFFER: usize = 4 << 20;

/// The most that the kernel holds of what one side has sent: it may grant less than was requested, or twice that.
const WINDOW: usize = 2 * SOCKET_BUFFER;

/// What all links of a process have in common.
#[derive(Debug, Clone)]
pub(crate) struct LinkRules {
    /// How links to and from each rank of the job are protected.
    pub(crate) security: Vec<LinkSecurity>,
    /// Whether each rank of the job is reached without leaving this machine.
    pub(crate) is_here: Vec<bool>,
    /// The number of the meeting.
    pub(crate) meeting: u64,
    /// How long a silent host is waited for.
    pub(crate) host_timeout: Duration,
}

/// The listener and the links that came in.
#[derive(Debug)]
pub(crate) struct Hub {
    key: JobKey,
    hello: Hello,
    rules: LinkRules,
    links: Arc<Links>,
    gate: Gate,
}

#[derive(Debug, Default)]
struct Links {
    waiting: Mutex<Waiting>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    arrived: HashMap<LinkName, Arrival>,
    /// New connections of known links, each with the number of bytes that the other side has received.
    resumed: HashMap<LinkName, (Arrival, u64)>,
    /// Links that have arrived, claimed or not. Only these can be resumed.
    known: HashSet<LinkName>,
    /// Groups that have ended, the newest last. Names of groups are not used twice.
    over: VecDeque<String>,
}

/// An incoming link, or a new connection of one.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) stream: TcpStream,
    pub(super) session: Session,
}

/// Why a link could not be made.
#[derive(Debug)]
pub(crate) enum DialError {
    /// The other side has the key and refuses the link for good.
    Refused(String),
    /// Another attempt may succeed.
    Failed(String),
}

impl Links {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub {
    /// Listens on a free port of `ip`. `hello` describes this process.
    pub(crate) fn open(ip: IpAddr, key: JobKey, hello: Hello, rules: LinkRules) -> Result<Self, StoreError> {
        let links = Arc::new(Links::default());
        let host = LinkHost { hello: hello.clone(), rules: rules.clone(), links: links.clone() };
        let gate = Gate::open((ip, 0), &key, host)?;
        Ok(Self { key, hello, rules, links, gate })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.gate.local_addr()
    }

    /// How long a silent host is waited for.
    pub(super) fn host_timeout(&self) -> Duration {
        self.rules.host_timeout
    }

    /// How this link is protected. This process is one end of it.
    pub(super) fn security(&self, name: &LinkName) -> LinkSecurity {
        self.rules.security[self.other(name)]
    }

    /// How many of the last bytes sent over this link are kept. Connections inside a machine do not break, and keeping bytes
    /// would cost a tenth of the rate and more there.
    pub(super) fn window(&self, name: &LinkName) -> usize {
        match self.security(name) {
            LinkSecurity::None if self.rules.is_here[self.other(name)] => 0,
            LinkSecurity::None => WINDOW,
            _ => WINDOW + MAX_BURST,
        }
    }

    fn other(&self, name: &LinkName) -> usize {
        if self.hello.rank == Some(name.from as u32) { name.to } else { name.from }
    }

    /// Claims the link, if it has arrived and the other side has confirmed it.
    pub(super) fn claim(&self, name: &LinkName) -> Option<Arrival> {
        let mut waiting = self.links.waiting();
        let mut confirmed = [0];
        let is_confirmed =
            (&waiting.arrived.get(name)?.stream).read(&mut confirmed).is_ok_and(|read| read == 1);
        // Only a confirmed link is resumed.
        if is_confirmed || waiting.resumed.contains_key(name) { waiting.arrived.remove(name) } else { None }
    }

    /// Waits a little for this link to arrive or to be confirmed.
    pub(super) fn wait_for(&self, name: &LinkName, timeout: Duration) {
        let stream = self.links.waiting().arrived.get(name).map(|arrival| arrival.stream.try_clone());
        match stream {
            Some(Ok(stream)) => {
                let nap = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
                let ready = rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::IN)], Some(&nap));
                // A connection that has ended is always ready; the other side connects again.
                if ready.is_ok_and(|ready| ready > 0) && stream.peek(&mut [0]).map_or(true, |read| read == 0)
                {
                    self.wait_for_news(timeout);
                }
            }
            _ => self.wait_for_news(timeout),
        }
    }

    /// Claims the newest connection of a resumed link, if there is one, and the number of bytes that the other side has received.
    pub(super) fn claim_resumed(&self, name: &LinkName) -> Option<(Arrival, u64)> {
        self.links.waiting().resumed.remove(name)
    }

    /// Waits a little for any link to arrive.
    pub(crate) fn wait_for_news(&self, timeout: Duration) {
        drop(self.links.news.wait_timeout(self.links.waiting(), timeout));
    }

    /// Wakes all that wait for links to arrive.
    pub(super) fn wake(&self) {
        drop(self.links.waiting());
        self.links.news.notify_all();
    }

    /// Closes the unclaimed links of a group that has ended, and those that arrive later.
    pub(crate) fn forget(&self, group: &str) {
        let mut waiting = self.links.waiting();
        waiting.arrived.retain(|name, _| name.group != group);
        waiting.resumed.retain(|name, _| name.group != group);
        waiting.known.retain(|name| name.group != group);
        if waiting.over.len() == REMEMBERED {
            waiting.over.pop_front();
        }
        waiting.over.push_back(group.into());
    }

    /// Makes a link to the hub at `address`; or resumes it, with the number of bytes received so far.
    pub(super) fn connect(
        &self,
        address: SocketAddr,
        name: &LinkName,
        resumes: Option<u64>,
        deadline: Instant,
    ) -> Result<(TcpStream, Session), DialError> {
        let failed = |error: io::Error| DialError::Failed(error.to_string());
        let longest = if resumes.is_some() { ATTEMPT } else { PROOF_TIME };
        let left =
            || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)).min(longest);
        let mut stream = TcpStream::connect_timeout(&address, left()).map_err(failed)?;
        let (security, meeting) = (self.security(name), self.rules.meeting);
        let note = LinkNote { name: name.clone(), security, meeting, resumes };
        let hello = Hello { note: note.encode(), ..self.hello.clone() };
        let session = handshake::connect(&mut stream, &self.key, &hello, Instant::now() + left());
        let session = session.map_err(|error| match error {
            HandshakeError::Refused(reason) => DialError::Refused(reason.to_string()),
            other => DialError::Failed(other.to_string()),
        })?;
        if resumes.is_none() {
            stream.write_all(&[CONFIRMED]).map_err(failed)?;
        }
        prepare(&stream, self.rules.host_timeout).map_err(failed)?;
        Ok((stream, session))
    }
}

/// Sets the socket's options: no delay, no blocking, and an end to links whose other side does not answer for `host_timeout`.
fn prepare(stream: &TcpStream, host_timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    // Enough to keep both sides busy while one of them reduces; the kernel may grant less.
    let _ = sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    // By a probe, a side that only waits learns that the other one has lost the connection. A host that answers none of them
    // counts as lost after the host timeout.
    let probe = (host_timeout / 6).clamp(Duration::from_secs(1), PROBE);
    let num_probes = (host_timeout.as_secs() / probe.as_secs()).saturating_sub(1).clamp(1, MAX_PROBES);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, probe)?;
    sockopt::set_tcp_keepintvl(stream, probe)?;
    sockopt::set_tcp_keepcnt(stream, num_probes as u32)?;
    // No time limit for data that is not acknowledged: it would also end the link to a rank that is alive but busy, and whose
    // receive buffer is full.
    // The store reports a rank's death, and the call's deadline covers a silent rank.
    sockopt::set_tcp_user_timeout(stream, 0)?;
    Ok(())
}

/// Accepts connections that have proved the key.
struct LinkHost {
    /// Describes this process.
    hello: Hello,
    rules: LinkRules,
    links: Arc<Links>,
}

impl LinkHost {
    fn check(&self, hello: &Hello) -> Result<LinkNote, Refusal> {
        let other = |message: String| Refusal::new(Cause::Other, message);
        if hello.role != Role::Link {
            return Err(other("this is a rank, not the store".into()));
        }
        if hello.round != self.hello.round {
            let message = format!("round {} met round {}", hello.round, self.hello.round);
            return Err(Refusal::new(Cause::Round, message));
        }
        let note =
            LinkNote::decode(&hello.note).ok_or_else(|| other(format!("the link of {hello} has no name")))?;
        let LinkName { from, to, .. } = note.name;
        if hello.rank != Some(from as u32) || self.hello.rank != Some(to as u32) {
            let message =
                format!("a link from rank {from} to rank {to}, made by {hello}, came in at {}", self.hello);
            return Err(Refusal::new(Cause::Rank, message));
        }
        if note.meeting != self.rules.meeting {
            return Err(other(format!("meeting {} met meeting {}", note.meeting, self.rules.meeting)));
        }
        let expected = self.rules.security.get(from).copied().unwrap_or(LinkSecurity::None);
        if note.security != expected {
            return Err(other(format!(
                "rank {from} protects its link with `{}`, rank {to} with `{expected}`; try the same {} on all ranks",
                note.security,
                worker_env::DRUMLINE_LINK_SECURITY
            )));
        }
        Ok(note)
    }
}

impl Host for LinkHost {
    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal> {
        let note = self.check(hello)?;
        let is_known = self.links.waiting().known.contains(&note.name);
        if note.resumes.is_some() && !is_known {
            return Err(Refusal::new(Cause::Ending, format!("{} has dropped the group", self.hello)));
        }
        Ok(())
    }

    fn receive(&mut self, hello: Hello, stream: TcpStream, session: Session) {
        let Ok(LinkNote { name, resumes, .. }) = self.check(&hello) else { return };
        let mut waiting = self.links.waiting();
        if waiting.over.contains(&name.group) || prepare(&stream, self.rules.host_timeout).is_err() {
            return;
        }
        match resumes {
            Some(received) => drop(waiting.resumed.insert(name, (Arrival { stream, session }, received))),
            None => {
                waiting.known.insert(name.clone());
                waiting.arrived.insert(name, Arrival { stream, session });
            }
        }
        self.links.news.notify_all();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::name::Channel;
    use super::*;
    use std::net::Ipv4Addr;

    pub(in super::super) fn hub_of(rank: usize, key: &JobKey, security: LinkSecurity) -> Hub {
        let hello = Hello::new(Role::Link).member(rank, 4);
        let rules = LinkRules {
            security: vec![security; 4],
            is_here: vec![true; 4],
            meeting: 1,
            host_timeout: Duration::from_secs(5),
        };
        Hub::open(Ipv4Addr::LOCALHOST.into(), key.clone(), hello, rules).unwrap()
    }

    /// The hubs of ranks 3 and 0.
    fn hubs(key: &JobKey) -> (Hub, Hub) {
        (hub_of(3, key, LinkSecurity::None), hub_of(0, key, LinkSecurity::None))
    }

    fn connect(from: &Hub, to: &Hub, name: &LinkName) -> Result<TcpStream, String> {
        let made = from.connect(to.address(), name, None, soon());
        let stream = made.map(|(stream, _)| stream).map_err(|error| format!("{error:?}"))?;
        stream.set_nonblocking(false).map_err(|error| error.to_string())?;
        Ok(stream)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    /// A link from rank 3 to rank 0.
    pub(in super::super) fn name() -> LinkName {
        LinkName { group: "world/1".into(), channel: Channel::Mail, from: 3, to: 0 }
    }

    fn claim(hub: &Hub, name: &LinkName) -> Option<TcpStream> {
        let deadline = soon();
        while Instant::now() < deadline {
            if let Some(Arrival { stream, .. }) = hub.claim(name) {
                stream.set_nonblocking(false).unwrap();
                return Some(stream);
            }
            hub.wait_for_news(Duration::from_millis(20));
        }
        None
    }

    #[test]
    fn a_link_arrives_under_its_name() {
        let key = JobKey::random();
        let (a, b) = hubs(&key);
        let mut there = connect(&a, &b, &name()).unwrap();
        let mut here = claim(&b, &name()).unwrap();
        there.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        here.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        assert!(b.claim(&name()).is_none());
    }

    #[test]
    fn a_link_that_is_not_confirmed_cannot_be_claimed() {
        let key = JobKey::random();
        let (a, b) = hubs(&key);
        // As `connect` does, up to the answer, which is lost.
        let mut lost = TcpStream::connect(b.address()).unwrap();
        let note = LinkNote { name: name(), security: LinkSecurity::None, meeting: 1, resumes: None };
        let hello = Hello { note: note.encode(), ..a.hello.clone() };
        handshake::connect(&mut lost, &key, &hello, soon()).unwrap();
        while !b.links.waiting().arrived.contains_key(&name()) {
            b.wait_for_news(Duration::from_millis(20));
        }
        assert!(b.claim(&name()).is_none());
        drop(lost);
        b.wait_for(&name(), Duration::from_millis(20));
        assert!(b.claim(&name()).is_none());
        let mut there = connect(&a, &b, &name()).unwrap();
        let mut here = claim(&b, &name()).unwrap();
        there.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        here.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello", "the second one is the link");
    }

    #[test]
    fn another_key_is_refused() {
        let ((a, _), (_, b)) = (hubs(&JobKey::random()), hubs(&JobKey::random()));
        assert!(connect(&a, &b, &name()).is_err());
        assert!(b.claim(&name()).is_none());
    }

    #[test]
    fn silent_strangers_do_not_keep_members_out() {
        let key = JobKey::random();
        let (a, b) = hubs(&key);
        let strangers: Vec<_> = (0..500).map(|_| TcpStream::connect(b.address()).unwrap()).collect();
        assert!(connect(&a, &b, &name()).is_ok());
        drop(strangers);
    }

    #[test]
    fn a_link_that_arrives_at_another_rank_is_refused() {
        let key = JobKey::random();
        let (three, zero) = hubs(&key);
        let one = hub_of(1, &key, LinkSecurity::None);
        let error = connect(&three, &one, &name()).unwrap_err();
        assert!(error.contains("from rank 3 to rank 0") && error.contains("came in at rank 1"), "{error}");
        let error = connect(&one, &zero, &name()).unwrap_err();
        assert!(error.contains("made by rank 1"), "another rank's name: {error}");
        assert!(connect(&three, &zero, &name()).is_ok(), "control");
    }

    #[test]
    fn two_kinds_of_protection_are_refused() {
        let key = JobKey::random();
        let (mac, none) = (hub_of(3, &key, LinkSecurity::Mac), hub_of(0, &key, LinkSecurity::None));
        let error = connect(&mac, &none, &name()).unwrap_err();
        assert!(error.contains("Refused") && error.contains("with `mac`, rank 0 with `none`"), "{error}");
    }

    #[test]
    fn only_links_that_have_arrived_can_be_resumed() {
        let key = JobKey::random();
        let (a, b) = hubs(&key);
        let resume = |received| a.connect(b.address(), &name(), Some(received), soon());
        assert!(matches!(resume(7), Err(DialError::Refused(_))));
        let _first = connect(&a, &b, &name()).unwrap();
        while !b.links.waiting().known.contains(&name()) {
            b.wait_for_news(Duration::from_millis(20));
        }
        let (_older, _newer) = (resume(7).unwrap(), resume(8).unwrap());
        while b.links.waiting().resumed.get(&name()).is_none_or(|(_, received)| *received != 8) {
            b.wait_for_news(Duration::from_millis(20));
        }
        b.forget("world/1");
        assert!(matches!(resume(9), Err(DialError::Refused(_))), "its group has ended");
    }

    /// Whether the other side has closed it.
    fn is_closed(mut link: &TcpStream) -> bool {
        link.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        match link.read(&mut [0]) {
            Ok(read) => read == 0,
            // Bytes that it had not read make it reset the connection.
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    #[test]
    fn the_end_of_a_group_closes_its_links_and_no_others() {
        let key = JobKey::random();
        let (a, b) = hubs(&key);
        let other = LinkName { group: "world/2".into(), ..name() };
        let [gone, kept] = [&name(), &other].map(|name| connect(&a, &b, name).unwrap());
        // The second one has arrived, so both have.
        while !b.links.waiting().known.contains(&other) {
            b.wait_for_news(Duration::from_millis(20));
        }
        b.forget("world/1");
        assert!(is_closed(&gone), "it was not claimed");
        let late = connect(&a, &b, &name()).unwrap();
        assert!(is_closed(&late), "it arrived too late");
        assert!(b.claim(&name()).is_none());
        (&kept).write_all(b"x").unwrap();
        claim(&b, &other).unwrap().read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn ended_groups_are_not_remembered_for_ever() {
        let (hub, _) = hubs(&JobKey::random());
        (0..2 * REMEMBERED).for_each(|number| hub.forget(&format!("world/{number}")));
        assert_eq!(hub.links.waiting().over.len(), REMEMBERED);
    }

    #[test]
    fn dropping_frees_port_and_thread() {
        let key = JobKey::random();
        let (hub, _) = hubs(&key);
        let address = hub.address();
        drop(hub);
        assert!(TcpStream::connect(address).is_err());
    }
}
