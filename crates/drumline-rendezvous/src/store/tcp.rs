//! The client of a [`TcpStoreServer`](crate::TcpStoreServer).
//!
//! Many threads may call at once: each call has a connection to itself, taken from those that are idle, or opened
//! for it. All of them bear the same random number, by which the server knows them as one member's. The first is
//! the member's *life line*: should it end without a goodbye, the server tells everyone that the rank is lost.

mod dial;
mod wire;

use super::Store;
use super::error::StoreError;
use super::request::{Reply, Request};
use super::timed_out::timed_out;
use crate::JobKey;
use crate::handshake::{Hello, Prover};
use crate::job_key::random_bytes;
use dial::Dial;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wire::{Broken, Wire};

/// Time for requests that wait for nobody, and for one more connection, unless less is wanted.
const PROMPT: Duration = Duration::from_secs(30);
/// Less than this is not enough for a busy machine.
const LEAST_PROMPT: Duration = Duration::from_secs(1);
/// Idle connections kept besides the life line.
const IDLE: usize = 8;

/// A store at the other end of TCP connections. Dropping it says goodbye, unless the thread panics.
pub struct TcpStore {
    dial: Dial,
    local: SocketAddr,
    server: SocketAddr,
    idle: Mutex<Vec<Wire>>,
    left: AtomicBool,
    prompt: Duration,
}

impl TcpStore {
    /// Meets the server at `addr` (`host:port`), trying again until the deadline: it may come up later. Refusals, and a
    /// server that does not prove the job key, end it at once.
    pub fn connect(
        addr: &str,
        key: &JobKey,
        hello: Hello,
        deadline: Instant,
    ) -> Result<TcpStore, StoreError> {
        let mut number = [0; 16];
        random_bytes(&mut number);
        let mut dial = Dial {
            addr: addr.into(),
            prover: Prover::from(key),
            is_secret: key.is_secret(),
            hello: hello.note(&number),
            was_there: false,
        };
        let life_line = dial.open(deadline)?.into_life_line();
        dial.was_there = true;
        let (local, server) = life_line.ends().map_err(StoreError::io("the connection has no address"))?;
        let (idle, left) = (Mutex::new(vec![life_line]), AtomicBool::new(false));
        Ok(TcpStore { dial, local, server, idle, left, prompt: PROMPT })
    }

    /// A server that stands still is given up on after `limit` also by requests that wait for nobody.
    pub(crate) fn prompt_within(mut self, limit: Duration) -> Self {
        self.prompt = limit.clamp(LEAST_PROMPT, PROMPT);
        self
    }

    /// The address from which this process reaches the store.
    pub fn local_ip(&self) -> IpAddr {
        self.local.ip()
    }

    /// Where the store is.
    pub fn server_addr(&self) -> SocketAddr {
        self.server
    }

    /// Says goodbye: from now on the end of this process is no loss. Calls still work.
    pub fn bye(&self) {
        if self.left.swap(true, Ordering::Relaxed) {
            return;
        }
        // Over a connection that is there: a store that has lost them all has lost this member too.
        let wire = self.idle().pop();
        if let Some(mut wire) = wire
            && wire.say_bye().is_ok()
        {
            self.give_back(wire);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Wire>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_wire(&self, deadline: Instant) -> Result<Wire, StoreError> {
        let idle = self.idle().pop();
        match idle {
            Some(wire) => Ok(wire),
            None if self.left.load(Ordering::Relaxed) => self.dial.as_guest().open(deadline),
            None => self.dial.open(deadline),
        }
    }

    fn give_back(&self, wire: Wire) {
        let mut idle = self.idle();
        if wire.is_life_line() {
            idle.insert(0, wire);
        } else if idle.len() <= IDLE {
            idle.push(wire);
        }
    }
}

impl Store for TcpStore {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        request.check_limits()?;
        let began = Instant::now();
        let deadline = if request.waits() { deadline.unwrap_or(began) } else { began + self.prompt };
        let mut wire = self.take_wire(deadline.max(began + Duration::from_secs(1)))?;
        // What a wait was for is needed when it fails; other requests may carry much.
        let wait = request.waits().then(|| request.clone());
        let what = || wait.as_ref().map_or_else(|| String::from("a request"), Request::to_string);
        let addr = || self.dial.addr.clone();
        match wire.call(request, deadline) {
            Ok(Some(reply)) => {
                self.give_back(wire);
                Ok(reply)
            }
            Ok(None) => {
                self.give_back(wire);
                Err(match &wait {
                    Some(wait) => timed_out(self, wait, began),
                    None => StoreError::Timeout { what: what(), after: began.elapsed() },
                })
            }
            Err(Broken::Io(source)) => Err(StoreError::Gone { addr: addr(), what: what(), source }),
            Err(Broken::Frame(source)) => Err(StoreError::Protocol { addr: addr(), source }),
            Err(Broken::Closed(reason)) => Err(StoreError::Rejected { reason }),
        }
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        let left = self.left.load(Ordering::Relaxed) || std::thread::panicking();
        if let Some(wire) = self.idle().first_mut()
            && !left
        {
            let _ = wire.say_bye();
        }
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStore({} at {})", self.dial.hello, self.server)
    }
}
