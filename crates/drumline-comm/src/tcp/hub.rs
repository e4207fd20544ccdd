//! Where links begin: one listener a process, and the links that have come in, waiting to be claimed.
//!
//! It listens on one address only, the one this process is known by. Who comes in must first prove the job's key, at a
//! [`Gate`] that holds strangers in a few hundred bytes each. What came in for a group that is over goes with it.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drumline_rendezvous::handshake::Session;
use drumline_rendezvous::{Cause, Gate, Hello, Host, JobKey, Refusal, Role, StoreError, handshake};

/// What a link is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Channel {
    /// Collectives, both ways.
    Data = 1,
    /// Point-to-point messages, from the one who connected.
    Mail = 2,
}

/// Which link: of a group, for a purpose, from one of its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LinkName {
    pub(crate) group: String,
    pub(crate) channel: Channel,
    pub(crate) from: usize,
}

impl LinkName {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut note = vec![self.channel as u8];
        note.extend_from_slice(&(self.from as u32).to_le_bytes());
        note.extend_from_slice(self.group.as_bytes());
        note
    }

    pub(crate) fn decode(note: &[u8]) -> Option<Self> {
        let (&channel, rest) = note.split_first()?;
        let (from, group) = rest.split_first_chunk::<4>()?;
        let channel = match channel {
            1 => Channel::Data,
            2 => Channel::Mail,
            _ => return None,
        };
        let group = std::str::from_utf8(group).ok()?.to_owned();
        Some(Self { group, channel, from: u32::from_le_bytes(*from) as usize })
    }
}

/// How long one handshake may take.
const PROOF_TIME: Duration = Duration::from_secs(2);

/// Groups remembered that are over: long enough for links that were on their way when they ended.
const REMEMBERED: usize = 1024;

/// The listener and the links that came in.
#[derive(Debug)]
pub(crate) struct Hub {
    key: JobKey,
    hello: Hello,
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
    arrived: HashMap<LinkName, TcpStream>,
    /// Groups that are over, the newest last. Names of groups are not used twice.
    over: VecDeque<String>,
}

impl Links {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub {
    /// Listens on a free port of `ip`. `hello` says who this process is.
    pub(crate) fn open(ip: IpAddr, key: JobKey, hello: Hello) -> Result<Self, StoreError> {
        let links = Arc::new(Links::default());
        let porter = Porter { round: hello.round, links: links.clone() };
        let gate = Gate::open((ip, 0), &key, porter)?;
        Ok(Self { key, hello, links, gate })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.gate.local_addr()
    }

    /// Takes the link if it has come in.
    pub(crate) fn claim(&self, name: &LinkName) -> Option<TcpStream> {
        self.links.waiting().arrived.remove(name)
    }

    /// Waits a little for any link to come in.
    pub(crate) fn wait_for_news(&self, patience: Duration) {
        drop(self.links.news.wait_timeout(self.links.waiting(), patience));
    }

    /// The group is over: closes its links that nobody has claimed, and those that come in later.
    pub(crate) fn forget(&self, group: &str) {
        let mut waiting = self.links.waiting();
        waiting.arrived.retain(|name, _| name.group != group);
        if waiting.over.len() == REMEMBERED {
            waiting.over.pop_front();
        }
        waiting.over.push_back(group.into());
    }

    /// Makes a link to the hub at `address`.
    pub(crate) fn connect(
        &self,
        address: SocketAddr,
        name: &LinkName,
        deadline: Instant,
    ) -> Result<TcpStream, String> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let mut stream =
            TcpStream::connect_timeout(&address, left.min(PROOF_TIME)).map_err(|error| error.to_string())?;
        let hello = Hello { note: name.encode(), ..self.hello.clone() };
        handshake::connect(&mut stream, &self.key, &hello, deadline.min(Instant::now() + PROOF_TIME))
            .map_err(|error| error.to_string())?;
        Ok(stream)
    }
}

/// Takes in what has proved the key.
struct Porter {
    round: u32,
    links: Arc<Links>,
}

impl Host for Porter {
    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal> {
        if hello.role != Role::Link {
            return Err(Refusal::new(Cause::Other, "this is a rank, not the store"));
        }
        if hello.round != self.round {
            let message = format!("round {} met round {}", hello.round, self.round);
            return Err(Refusal::new(Cause::Round, message));
        }
        match LinkName::decode(&hello.note) {
            Some(_) => Ok(()),
            None => Err(Refusal::new(Cause::Other, format!("the link of {hello} has no name"))),
        }
    }

    fn receive(&mut self, hello: Hello, stream: TcpStream, _: Session) {
        let Some(name) = LinkName::decode(&hello.note) else { return };
        let mut waiting = self.links.waiting();
        if !waiting.over.contains(&name.group) {
            waiting.arrived.insert(name, stream);
            self.links.news.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::Ipv4Addr;

    fn hub(key: &JobKey) -> Hub {
        Hub::open(Ipv4Addr::LOCALHOST.into(), key.clone(), Hello::new(Role::Link).member(0, 2)).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn name() -> LinkName {
        LinkName { group: "world/1".into(), channel: Channel::Mail, from: 3 }
    }

    fn claim(hub: &Hub, name: &LinkName) -> Option<TcpStream> {
        let deadline = soon();
        while Instant::now() < deadline {
            if let Some(stream) = hub.claim(name) {
                return Some(stream);
            }
            hub.wait_for_news(Duration::from_millis(20));
        }
        None
    }

    #[test]
    fn a_link_arrives_under_its_name() {
        let key = JobKey::random();
        let (a, b) = (hub(&key), hub(&key));
        let mut there = a.connect(b.address(), &name(), soon()).unwrap();
        let mut here = claim(&b, &name()).unwrap();
        there.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        here.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        assert!(b.claim(&name()).is_none());
    }

    #[test]
    fn another_key_gets_nowhere() {
        let (a, b) = (hub(&JobKey::random()), hub(&JobKey::random()));
        assert!(a.connect(b.address(), &name(), soon()).is_err());
        assert!(b.claim(&name()).is_none());
    }

    #[test]
    fn silent_strangers_do_not_keep_members_out() {
        let key = JobKey::random();
        let (a, b) = (hub(&key), hub(&key));
        let strangers: Vec<_> = (0..500).map(|_| TcpStream::connect(b.address()).unwrap()).collect();
        assert!(a.connect(b.address(), &name(), soon()).is_ok());
        drop(strangers);
    }

    /// Whether the other side has closed it.
    fn is_closed(mut link: &TcpStream) -> bool {
        link.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        matches!(link.read(&mut [0]), Ok(0))
    }

    #[test]
    fn a_group_that_is_over_takes_its_links_along_and_no_others() {
        let key = JobKey::random();
        let (a, b) = (hub(&key), hub(&key));
        let other = LinkName { group: "world/2".into(), ..name() };
        let [gone, kept] = [&name(), &other].map(|name| a.connect(b.address(), name, soon()).unwrap());
        // The one that came last has arrived, so both have.
        let claimed = claim(&b, &other).unwrap();
        b.links.waiting().arrived.insert(other.clone(), claimed);
        b.forget("world/1");
        assert!(is_closed(&gone), "it waited for nobody");
        let late = a.connect(b.address(), &name(), soon()).unwrap();
        assert!(is_closed(&late), "it came too late");
        assert!(b.claim(&name()).is_none());
        (&kept).write_all(b"x").unwrap();
        claim(&b, &other).unwrap().read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn groups_that_are_over_are_not_remembered_for_ever() {
        let hub = hub(&JobKey::random());
        (0..2 * REMEMBERED).for_each(|number| hub.forget(&format!("world/{number}")));
        assert_eq!(hub.links.waiting().over.len(), REMEMBERED);
    }

    #[test]
    fn dropping_frees_port_and_thread() {
        let key = JobKey::random();
        let hub = hub(&key);
        let address = hub.address();
        drop(hub);
        assert!(TcpStream::connect(address).is_err());
    }
}
