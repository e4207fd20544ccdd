//! Where links begin: one listener a process, and the links that have come in, waiting to be claimed.
//!
//! It listens on one address only, the one this process is known by. Who comes in must prove the job's key within two
//! seconds; until then it costs one small thread, of which there are few.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::{Cause, Hello, JobKey, Refusal, Role, handshake};

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

/// Handshakes under way at once; when one more comes, the oldest is turned away.
const MAX_UNPROVED: usize = 64;

/// How long one handshake may take.
const PROOF_TIME: Duration = Duration::from_secs(2);

/// The listener and the links that came in.
#[derive(Debug)]
pub(crate) struct Hub {
    address: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    key: JobKey,
    hello: Hello,
    arrived: Mutex<HashMap<LinkName, TcpStream>>,
    news: Condvar,
    stopping: AtomicBool,
    /// Who is proving itself, the one that came first in front.
    unproved: Mutex<VecDeque<(SocketAddr, TcpStream)>>,
}

impl Hub {
    /// Listens on a free port of `ip`. `hello` says who this process is.
    pub(crate) fn open(ip: IpAddr, key: JobKey, hello: Hello) -> io::Result<Self> {
        let listener = Arc::new(TcpListener::bind((ip, 0))?);
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            key,
            hello,
            arrived: Mutex::default(),
            news: Condvar::new(),
            stopping: AtomicBool::new(false),
            unproved: Mutex::default(),
        });
        let (acceptor, socket) = (shared.clone(), listener.clone());
        let thread =
            std::thread::Builder::new().name("drumline-hub".into()).spawn(move || acceptor.run(&socket))?;
        Ok(Self { address, listener, shared, thread: Some(thread) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes the link if it has come in.
    pub(crate) fn claim(&self, name: &LinkName) -> Option<TcpStream> {
        self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner).remove(name)
    }

    /// Waits a little for any link to come in.
    pub(crate) fn wait_for_news(&self, patience: Duration) {
        let arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.shared.news.wait_timeout(arrived, patience));
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
        let hello = Hello { note: name.encode(), ..self.shared.hello.clone() };
        handshake::connect(&mut stream, &self.shared.key, &hello, deadline.min(Instant::now() + PROOF_TIME))
            .map_err(|error| error.to_string())?;
        Ok(stream)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Ends the wait in `accept`.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(self: Arc<Self>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            match accepted {
                Ok((stream, from)) => Self::receive(&self, stream, from),
                // Out of descriptors: what is open must close first.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Lets one more prove itself. Where too many are at it, the one that has taken longest is turned away.
    fn receive(this: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let Ok(handle) = stream.try_clone() else { return };
        let mut unproved = this.unproved.lock().unwrap_or_else(PoisonError::into_inner);
        if unproved.len() >= MAX_UNPROVED
            && let Some((_, oldest)) = unproved.pop_front()
        {
            // Ends its thread's wait.
            let _ = oldest.shutdown(std::net::Shutdown::Both);
        }
        unproved.push_back((from, handle));
        drop(unproved);
        let shared = this.clone();
        let prove = move || {
            if let Err(error) = shared.admit(stream) {
                tracing::debug!(%from, error, "turned a stranger away");
            }
            shared.forget(from);
        };
        let thread =
            std::thread::Builder::new().name("drumline-proof".into()).stack_size(64 << 10).spawn(prove);
        if thread.is_err() {
            this.forget(from);
        }
    }

    fn forget(&self, from: SocketAddr) {
        self.unproved.lock().unwrap_or_else(PoisonError::into_inner).retain(|(address, _)| *address != from);
    }

    fn admit(&self, mut stream: TcpStream) -> Result<(), String> {
        let deadline = Instant::now() + PROOF_TIME;
        let mut name = None;
        handshake::accept(&mut stream, &self.key, deadline, |hello| {
            if hello.role != Role::Link {
                return Err(Refusal { cause: Cause::Other, message: "this is a rank, not the store".into() });
            }
            if hello.round != self.hello.round {
                let message = format!("round {} met round {}", hello.round, self.hello.round);
                return Err(Refusal { cause: Cause::Round, message });
            }
            name = LinkName::decode(&hello.note);
            Ok(())
        })
        .map_err(|error| error.to_string())?;
        let name = name.ok_or("a link without a name")?;
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).insert(name, stream);
        self.news.notify_all();
        Ok(())
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
        let strangers: Vec<_> =
            (0..2 * MAX_UNPROVED).map(|_| TcpStream::connect(b.address()).unwrap()).collect();
        assert!(a.connect(b.address(), &name(), soon()).is_ok());
        drop(strangers);
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
