//! The store's server: one thread, one event loop, any number of connections.
//!
//! ```text
//!  doorstep ── proved the job key ─▶ links ─▶ core ─▶ replies
//!                                      ▼ life line ends without a Bye, and is not resumed in a moment: Event::Lost
//! ```
//! A member that holds the key and is not let in is told why, and so are the others (`Event::Refused`): they need not wait
//! for it.
//! Read on: `event_loop` (the turns), `doorstep` (before the proof), `link` (after it), `roster` (who is a member),
//! `clients` (requests that come again), `grace` (life lines that broke).

mod clients;
mod event_loop;
mod grace;
mod link;
mod process;
mod roster;

use crate::JobKey;
use crate::handshake::Prover;
use crate::listen::listen;
use crate::store::error::StoreError;
use event_loop::EventLoop;
use mio::Waker;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the server expects of members.
#[derive(Debug, Clone, Copy, Default)]
pub struct ServerOptions {
    /// World size that members must agree with; `None`: that of the first member who knows it.
    pub world_size: Option<usize>,
    /// Round that members must belong to.
    pub round: u32,
}

/// A store that others reach by TCP; stops, and frees its port, when dropped.
///
/// ```
/// use drumline_rendezvous::{Hello, JobKey, Role, ServerOptions, Store, TcpStore, TcpStoreServer};
/// use std::time::{Duration, Instant};
/// let key = JobKey::random();
/// let server = TcpStoreServer::bind("127.0.0.1:0", &key, ServerOptions::default())?;
/// let soon = Instant::now() + Duration::from_secs(5);
/// let addr = server.local_addr().to_string();
/// let store = TcpStore::connect(&addr, &key, Hello::new(Role::Store), soon)?;
/// store.set("colour", b"red")?;
/// assert_eq!(store.get("colour", soon)?, b"red");
/// # Ok::<(), drumline_rendezvous::StoreError>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// What the owner and the event loop both see.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    ending: AtomicBool,
    others: Mutex<usize>,
    changed: Condvar,
}

impl TcpStoreServer {
    /// Listens on exactly `addr` (the first that can be had, if a name has several) and serves from now on.
    /// Without a secret key only loopback is accepted.
    pub fn bind(
        addr: impl ToSocketAddrs,
        key: &JobKey,
        options: ServerOptions,
    ) -> Result<TcpStoreServer, StoreError> {
        let listener = listen(addr, key)?;
        let failed = |what: &str| StoreError::io(format!("cannot serve the store: {what}"));
        let addr = listener.local_addr().map_err(failed("no local address"))?;
        let shared = Arc::new(Shared::default());
        let event_loop = EventLoop::new(listener, Prover::from(key), options, shared.clone())
            .map_err(failed("no event queue"))?;
        let waker = event_loop.waker().map_err(failed("no waker"))?;
        let thread = std::thread::Builder::new()
            .name("drumline-store".into())
            .spawn(move || event_loop.run())
            .map_err(failed("no thread"))?;
        tracing::info!(%addr, secret = key.is_secret(), "store listening");
        Ok(TcpStoreServer { addr, shared, waker, thread: Some(thread) })
    }

    /// The same at the first of these addresses (`host:port`) whose port nobody has.
    pub fn bind_first(
        addrs: &[String],
        key: &JobKey,
        options: ServerOptions,
    ) -> Result<TcpStoreServer, StoreError> {
        let mut taken = None;
        for addr in addrs {
            match Self::bind(addr, key, options) {
                Err(error) if error.is_port_taken() => taken = Some(error),
                other => return other,
            }
        }
        Err(taken.unwrap_or_else(|| StoreError::Rejected { reason: "it was given no address".into() }))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Lets no new member in and waits, at most `patience`, until all members of other processes have left or are lost.
    pub fn linger(&self, patience: Duration) {
        self.shared.ending.store(true, Ordering::Relaxed);
        let until = Instant::now() + patience;
        let mut others = self.shared.others.lock().unwrap_or_else(PoisonError::into_inner);
        if *others > 0 {
            tracing::info!(others = *others, ?patience, "store stays until the other members have left");
        }
        while *others > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::debug!(others = *others, "store ends while members are still there");
                return;
            }
            others = self.shared.changed.wait_timeout(others, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn set_others(&self, count: usize) {
        *self.others.lock().unwrap_or_else(PoisonError::into_inner) = count;
        self.changed.notify_all();
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if self.waker.wake().is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}
