//! A doorstep with a thread of its own: hands each connection that has proved the job key on to its host.

use super::{Doorstep, Knock, LISTEN, Proved, Stranger, WAKE};
use crate::JobKey;
use crate::handshake::{Hello, Prover, Refusal, ServerHandshake, Session};
use crate::listen::listen;
use crate::store::error::StoreError;
use mio::{Events, Poll, Waker};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

/// Who decides about those that hold the key, and takes them in.
pub trait Host: Send + 'static {
    /// Lets `hello` in or says why not.
    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal>;

    /// Takes the connection of one that was let in and knows it, and the connection's keys; calls on it block.
    fn receive(&mut self, hello: Hello, stream: TcpStream, session: Session);
}

/// Listens, and lets in whoever proves the job key and is admitted; stops, and frees its port, when dropped.
///
/// ```
/// use drumline_rendezvous::handshake::{self, Session};
/// use drumline_rendezvous::{Gate, Hello, Host, JobKey, Refusal, Role};
/// use std::net::TcpStream;
/// use std::sync::mpsc::{Sender, channel};
/// use std::time::{Duration, Instant};
///
/// struct Names(Sender<Vec<u8>>);
/// impl Host for Names {
///     fn admit(&mut self, _: &Hello) -> Result<(), Refusal> {
///         Ok(())
///     }
///     fn receive(&mut self, hello: Hello, _: TcpStream, _: Session) {
///         self.0.send(hello.note).unwrap();
///     }
/// }
///
/// let (key, (names, came)) = (JobKey::random(), channel());
/// let gate = Gate::open("127.0.0.1:0", &key, Names(names))?;
/// let mut stream = TcpStream::connect(gate.local_addr())?;
/// let soon = Instant::now() + Duration::from_secs(5);
/// handshake::connect(&mut stream, &key, &Hello::new(Role::Link).note(b"ann"), soon)?;
/// assert_eq!(came.recv()?, b"ann");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Gate {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Gate {
    /// Listens on exactly `addr` and hands on to `host` from now on. Without a secret key only loopback is accepted.
    pub fn open(addr: impl ToSocketAddrs, key: &JobKey, host: impl Host) -> Result<Gate, StoreError> {
        let listener = listen(addr, key)?;
        let failed = |what: &str| StoreError::io(format!("cannot listen: {what}"));
        let addr = listener.local_addr().map_err(failed("no local address"))?;
        let poll = Poll::new().map_err(failed("no event queue"))?;
        let registry = poll.registry().try_clone().map_err(failed("no event queue"))?;
        let waker = Waker::new(&registry, WAKE).map_err(failed("no waker"))?;
        let doorstep =
            Doorstep::new(listener, Prover::from(key), registry).map_err(failed("no event queue"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let keeper = Keeper { poll, doorstep, host, stop: stop.clone() };
        let thread = std::thread::Builder::new()
            .name("drumline-gate".into())
            .spawn(move || keeper.run())
            .map_err(failed("no thread"))?;
        Ok(Gate { addr, stop, waker, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if self.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Keeper<H> {
    poll: Poll,
    doorstep: Doorstep,
    host: H,
    stop: Arc<AtomicBool>,
}

impl<H: Host> Keeper<H> {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            let patience = self.doorstep.next_turn().map(|at| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, patience)
                && error.kind() != ErrorKind::Interrupted
            {
                tracing::error!(%error, "the event queue failed; no more links can come in");
                return;
            }
            for event in &events {
                match event.token() {
                    WAKE => {}
                    LISTEN => self.doorstep.ring(),
                    token => self.serve(token.0),
                }
            }
            self.doorstep.turn(Instant::now());
        }
    }

    fn serve(&mut self, token: usize) {
        // One that was refused has been told, and waits for nobody here.
        let Some(Knock::Proved(proved)) = self.doorstep.serve(token) else { return };
        let Proved { mut stranger, hello, session, .. } = *proved;
        match self.host.admit(&hello) {
            Err(refusal) => stranger.refuse(&refusal),
            Ok(()) => match self.welcome(stranger) {
                Ok(stream) => self.host.receive(hello, stream, session),
                Err(error) => tracing::debug!(%error, member = %hello, "went away when it was let in"),
            },
        }
    }

    /// Tells it, and turns it into a connection like any other.
    fn welcome(&self, mut stranger: Stranger) -> io::Result<TcpStream> {
        self.poll.registry().deregister(&mut stranger.stream)?;
        stranger.send(&ServerHandshake::WELCOME).map_err(io::Error::other)?;
        let stream = TcpStream::from(stranger.stream);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}
