//! The client of a [`TcpStoreServer`](crate::TcpStoreServer).
//!
//! ```text
//!  call ─▶ id ─▶ an idle connection, or a new one ─▶ reply
//!            ▲ the same id   │ broken, or silent for a second or two
//!            └───────────────┘ up to the deadline, or until the host was silent for DRUMLINE_HOST_TIMEOUT
//! ```
//! Many threads may call at once: each call uses its own connection, an idle one or a new one. All of them carry the
//! same random number, by which the server recognizes one client. So a request that is sent again, because the
//! connection broke before the reply came, is carried out once.
//!
//! A member has one more connection, its *life line*. If it ends without a goodbye and is not resumed at once, the
//! server reports the rank as lost.

mod dial;
mod life_line;
mod request_ids;
mod silence;
mod wire;

use super::Store;
use super::error::StoreError;
use super::request::{Reply, Request};
use super::timed_out::timed_out;
use crate::JobKey;
use crate::client_note::Line;
use crate::frame::Call;
use crate::handshake::Hello;
use crate::worker_env::host_timeout;
use dial::{Dial, LastSeen, Opened};
use life_line::{Ending, LifeLine};
use request_ids::RequestIds;
use silence::Silence;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wire::{Broken, Outgoing, Wire};

/// Time limit for requests that do not wait for other ranks, and for a new connection, unless a shorter one is set.
const PROMPT: Duration = Duration::from_secs(30);
/// The shortest time limit: a busy machine may need this long.
const LEAST_PROMPT: Duration = Duration::from_secs(1);
/// How many idle connections are kept besides the life line.
const IDLE: usize = 8;

/// A store that is reached over TCP. Dropping it says goodbye, unless the thread panics.
pub struct TcpStore {
    dial: Dial,
    local: SocketAddr,
    server: SocketAddr,
    idle: Mutex<Vec<Wire>>,
    request_ids: RequestIds,
    silence: Arc<Silence>,
    life_line: Mutex<Option<LifeLine>>,
    left: AtomicBool,
    prompt: Duration,
}

impl TcpStore {
    /// Connects to the server at `addr` (`host:port`), and retries until the deadline, as the server may start later.
    /// It fails at once if the server refuses this client, or does not prove the job key.
    pub fn connect(
        addr: &str,
        key: &JobKey,
        hello: Hello,
        deadline: Instant,
    ) -> Result<TcpStore, StoreError> {
        let dial = Dial::new(addr, key, hello);
        let silence = Arc::new(Silence::new(host_timeout()));
        let wire = dial.line(dial.first_line()).open(deadline, &silence)?;
        Self::over(Opened { wire, dial }, silence)
    }

    /// The same with several addresses, one of which is the server's. They are tried in turn until a server proves the
    /// job key, repeatedly until the deadline.
    pub fn connect_first(
        addrs: &[String],
        key: &JobKey,
        hello: Hello,
        deadline: Instant,
    ) -> Result<TcpStore, StoreError> {
        if let [addr] = addrs {
            return Self::connect(addr, key, hello, deadline);
        }
        let dials = addrs.iter().map(|addr| {
            let dial = Dial::new(addr, key, hello.clone());
            dial.line(dial.first_line())
        });
        let silence = Arc::new(Silence::new(host_timeout()));
        let opened = Dial::open_first(&dials.collect::<Vec<_>>(), deadline, &silence)?;
        Self::over(opened, silence)
    }

    /// A store that uses this first connection.
    fn over(opened: Opened, silence: Arc<Silence>) -> Result<TcpStore, StoreError> {
        let Opened { wire: first, mut dial } = opened;
        let is_member = dial.hello.rank.is_some();
        let (local, server) = first.ends().map_err(StoreError::io("the connection has no address"))?;
        dial.last_seen = LastSeen::at(local.ip(), server.ip());
        let mut store = TcpStore {
            dial: dial.line(Line::Calls),
            local,
            server,
            idle: Mutex::default(),
            request_ids: RequestIds::default(),
            silence,
            life_line: Mutex::default(),
            left: AtomicBool::new(false),
            prompt: PROMPT.max(host_timeout()),
        };
        if is_member {
            let started = LifeLine::start(first, &dial, store.silence.clone());
            let started = started.map_err(StoreError::io("cannot watch over the connection to the store"))?;
            store.life_line = Mutex::new(Some(started));
        } else {
            store.give_back(first);
        }
        Ok(store)
    }

    /// Limits how long requests that do not wait for other ranks wait for a frozen server.
    pub(crate) fn prompt_within(mut self, limit: Duration) -> Self {
        self.prompt = limit.clamp(LEAST_PROMPT, self.prompt);
        self
    }

    /// The address from which this process reaches the store.
    pub fn local_ip(&self) -> IpAddr {
        self.local.ip()
    }

    /// The address of the store.
    pub fn server_addr(&self) -> SocketAddr {
        self.server
    }

    /// Says goodbye: from now on the end of this process does not count as a loss. Calls still work.
    pub fn bye(&self) {
        self.left.store(true, Ordering::Relaxed);
        self.end_life_line(Ending::Goodbye);
    }

    fn end_life_line(&self, ending: Ending) {
        let line = self.life_line.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(line) = line {
            line.end(ending);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Wire>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_wire(&self, deadline: Instant) -> Result<Wire, StoreError> {
        let idle = self.idle().pop();
        match idle {
            Some(wire) => Ok(wire),
            None if self.left.load(Ordering::Relaxed) => self.dial.as_guest().open(deadline, &self.silence),
            None => self.dial.open(deadline, &self.silence),
        }
    }

    fn give_back(&self, wire: Wire) {
        let mut idle = self.idle();
        if idle.len() < IDLE {
            idle.push(wire);
        }
    }

    /// The reply, or `None` if the deadline has passed.
    fn send_and_wait(&self, call: &Call, until: Instant) -> Result<Option<Reply>, StoreError> {
        let request = self.request_ids.next();
        let mut tries = 0;
        loop {
            let soon = Instant::now() + LEAST_PROMPT;
            let mut wire = match self.take_wire(if tries == 0 { until.max(soon) } else { until }) {
                Err(StoreError::Unreachable { .. }) if !self.silence.is_over(Instant::now()) => {
                    return Ok(None);
                }
                other => other?,
            };
            let outgoing = Outgoing { id: request.id, oldest: request.oldest(), call, tries };
            match wire.call(&outgoing, until) {
                Ok(reply) => {
                    if reply.is_some() {
                        self.silence.end();
                    }
                    self.give_back(wire);
                    return Ok(reply);
                }
                Err(Broken::Frame(source)) => {
                    return Err(StoreError::Protocol { addr: self.dial.addr.clone(), source });
                }
                Err(Broken::Closed(reason)) => return Err(StoreError::Rejected { reason }),
                // The other idle connections are most likely broken too.
                Err(Broken::Io(_) | Broken::Silent) => self.idle().clear(),
            }
            let now = Instant::now();
            self.silence.begin(now);
            if now >= until {
                return Ok(None);
            }
            tracing::debug!(store = %self.dial.addr, id = request.id, "no reply; sending the request again");
            tries += 1;
        }
    }
}

impl TcpStore {
    /// The error of a call that got no reply.
    fn unanswered(&self, request: &Request, began: Instant) -> StoreError {
        let now = Instant::now();
        match (request.waits(), self.silence.lasted(now)) {
            (true, None) => timed_out(self, request, began),
            (true, Some(silent)) => StoreError::Timeout {
                what: format!("{request} (the store at {} has been silent for {silent:.1?})", self.dial.addr),
                after: now - began,
            },
            (false, _) => self.silent(request, now - began),
        }
    }

    fn silent(&self, request: &Request, after: Duration) -> StoreError {
        StoreError::Silent { addr: self.dial.addr.clone(), what: request.to_string(), after }
    }
}

impl Store for TcpStore {
    fn call(&self, request: Request, deadline: Option<Instant>) -> Result<Reply, StoreError> {
        request.check_limits()?;
        let began = Instant::now();
        let until = if request.waits() { deadline.unwrap_or(began) } else { began + self.prompt };
        let call = Call::Request(request);
        let reply = self.send_and_wait(&call, until);
        let Call::Request(request) = call else { unreachable!("it was made of a request") };
        match reply {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(self.unanswered(&request, began)),
            Err(StoreError::Unreachable { .. }) => {
                let silent = self.silence.lasted(Instant::now()).unwrap_or(began.elapsed());
                Err(self.silent(&request, silent))
            }
            Err(StoreError::Gone { addr, source, .. }) => {
                Err(StoreError::Gone { addr, what: request.to_string(), source })
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        self.end_life_line(if std::thread::panicking() { Ending::Silent } else { Ending::Goodbye });
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStore({} at {})", self.dial.hello, self.server)
    }
}
