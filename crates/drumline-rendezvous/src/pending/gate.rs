//! Pending connections with a thread of their own: passes each connection that has proved the job key to its host.

use super::{Authenticated, HandshakeResult, LISTEN, PendingConnection, PendingConnections, WAKE};
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

/// Decides which clients that hold the key are admitted, and receives their connections.
pub trait Host: Send + 'static {
    /// Admits `hello`, or says why not.
    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal>;

    /// Receives the connection of an admitted client, which knows that it is admitted, and the connection's keys. Calls
    /// on it block.
    fn receive(&mut self, hello: Hello, stream: TcpStream, session: Session);
}

/// Listens, and accepts clients that prove the job key and are admitted. It stops, and frees its port, when dropped.
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
    /// Listens on exactly `addr`, and passes connections to `host`. Without a secret key only loopback is accepted.
    pub fn open(addr: impl ToSocketAddrs, key: &JobKey, host: impl Host) -> Result<Gate, StoreError> {
        let listener = listen(addr, key)?;
        let failed = |what: &str| StoreError::io(format!("cannot listen: {what}"));
        let addr = listener.local_addr().map_err(failed("no local address"))?;
        let poll = Poll::new().map_err(failed("no event queue"))?;
        let registry = poll.registry().try_clone().map_err(failed("no event queue"))?;
        let waker = Waker::new(&registry, WAKE).map_err(failed("no waker"))?;
        let pending = PendingConnections::new(listener, Prover::from(key), registry)
            .map_err(failed("no event queue"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let gate_loop = GateLoop { poll, pending, host, stop: stop.clone() };
        let thread = std::thread::Builder::new()
            .name("drumline-gate".into())
            .spawn(move || gate_loop.run())
            .map_err(failed("no thread"))?;
        Ok(Gate { addr, stop, waker, thread: Some(thread) })
    }

    /// The address on which it listens.
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

/// The state of the thread.
struct GateLoop<H> {
    poll: Poll,
    pending: PendingConnections,
    host: H,
    stop: Arc<AtomicBool>,
}

impl<H: Host> GateLoop<H> {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.pending.next_turn().map(|at| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != ErrorKind::Interrupted
            {
                tracing::error!(%error, "the event queue failed; no more connections can be accepted");
                return;
            }
            for event in &events {
                match event.token() {
                    WAKE => {}
                    LISTEN => self.pending.listener_changed(),
                    token => self.serve(token.0),
                }
            }
            self.pending.turn(Instant::now());
        }
    }

    fn serve(&mut self, token: usize) {
        // A refused client was informed already, and nobody waits for it here.
        let Some(HandshakeResult::Authenticated(authenticated)) = self.pending.serve(token) else { return };
        let Authenticated { mut connection, hello, session, .. } = *authenticated;
        match self.host.admit(&hello) {
            Err(refusal) => connection.refuse(&refusal),
            Ok(()) => match self.welcome(connection) {
                Ok(stream) => self.host.receive(hello, stream, session),
                Err(error) => {
                    tracing::debug!(%error, member = %hello, "the client disconnected when it was admitted")
                }
            },
        }
    }

    /// Informs the client, and turns its socket into a blocking one.
    fn welcome(&self, mut connection: PendingConnection) -> io::Result<TcpStream> {
        self.poll.registry().deregister(&mut connection.stream)?;
        connection.send(&ServerHandshake::WELCOME).map_err(io::Error::other)?;
        let stream = TcpStream::from(connection.stream);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}
