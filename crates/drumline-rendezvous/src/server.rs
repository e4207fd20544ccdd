//! The store's server: one thread, one event loop, any number of connections.
//!
//! ```text
//!  pending ── proved the job key ─▶ links ─▶ core ─▶ replies
//!                                      ▼ life line ends without a Bye and is not resumed at once: Event::Lost
//! ```
//! A member that holds the key and is not admitted is sent the reason. The others are informed too (`Event::Refused`),
//! so they need not wait for it.
//! Read next: `event_loop` (the loop), `pending` (before the proof), `link` (after it), `members` (who is a member),
//! `clients` (repeated requests), `grace_periods` (broken life lines).

mod clients;
mod event_loop;
mod grace_periods;
mod link;
mod members;
mod process;

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

/// What the server requires of members.
#[derive(Debug, Clone, Copy, Default)]
pub struct ServerOptions {
    /// The world size that members must have; `None` takes that of the first member that knows it.
    pub world_size: Option<usize>,
    /// The round that members must belong to.
    pub round: u32,
}

/// A store that others reach over TCP. It stops, and frees its port, when dropped.
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

/// The state shared by the owner and the event loop.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    ending: AtomicBool,
    others: Mutex<usize>,
    changed: Condvar,
}

impl TcpStoreServer {
    /// Starts a server on exactly `addr` (the first usable one, if a name has several).
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

    /// The same on the first of these addresses (`host:port`) whose port is free.
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
        Err(taken.unwrap_or(StoreError::NoAddress))
    }

    /// The address on which it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Admits no new members, and waits, at most `timeout`, until all members of other processes have left or are lost.
    pub fn linger(&self, timeout: Duration) {
        self.shared.ending.store(true, Ordering::Relaxed);
        let until = Instant::now() + timeout;
        let mut others = self.shared.others.lock().unwrap_or_else(PoisonError::into_inner);
        if *others > 0 {
            tracing::info!(others = *others, ?timeout, "the store stays until the other members have left");
        }
        while *others > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::debug!(others = *others, "the store ends while members are still connected");
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
