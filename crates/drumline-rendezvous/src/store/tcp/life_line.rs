//! A member's life line: the connection whose end shows the server that the process has died.
//!
//! ```text
//!  watch: ping, pong, ping, …  ── broken or silent ─▶ dial as `Resumed` ── admitted ─▶ watch
//!                                                          └─ refused, or no server ─▶ the end
//! ```
//! A network can break a connection while both ends live. The server then waits a moment before it reports the member
//! as lost. So the break must be noticed here at once, even if the program sends no request. That takes a thread. The
//! [`TcpStore`](super::TcpStore) owns it, and ends and joins it.
//!
//! A silent connection is kept until there is a new one: the server's process may just be frozen, and then it receives
//! a goodbye over the old one later.

use super::dial::{Attempts, Dial};
use super::silence::Silence;
use super::wire::{Broken, Wire, wake};
use crate::client_note::Line;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How the life line should end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// With a goodbye: the end of this process does not count as a loss.
    Goodbye = 1,
    /// Without one.
    Silent = 2,
}

/// Watches the life line, and reconnects it when it breaks.
#[derive(Debug)]
pub(super) struct LifeLine {
    control: Arc<LifeLineControl>,
    thread: JoinHandle<()>,
}

/// Lets the owner end the thread, whatever it waits for.
#[derive(Debug, Default)]
pub(super) struct LifeLineControl {
    /// 0, or an [`Ending`].
    ending: AtomicU8,
    /// The connection that the thread reads from.
    stream: Mutex<Option<TcpStream>>,
}

impl LifeLineControl {
    /// Sets the connection that the thread reads from.
    pub(super) fn attach(&self, stream: &TcpStream) {
        let mut held = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        *held = stream.try_clone().ok();
        if self.is_ending()
            && let Some(stream) = &*held
        {
            wake(stream);
        }
    }

    fn end(&self, ending: Ending) {
        let held = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        self.ending.store(ending as u8, Ordering::Release);
        if let Some(stream) = &*held {
            wake(stream);
        }
    }

    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire) != 0
    }
}

impl LifeLine {
    /// Starts watching `wire`; `dial` reconnects to the server.
    pub(super) fn start(wire: Wire, dial: &Dial, silence: Arc<Silence>) -> io::Result<LifeLine> {
        let control = Arc::new(LifeLineControl::default());
        wire.attach_to(&control);
        let dial = Dial { control: Some(control.clone()), ..dial.line(Line::Resumed) };
        let watcher = Watcher { control: control.clone(), dial, silence };
        let thread =
            std::thread::Builder::new().name("drumline-life".into()).spawn(move || watcher.run(wire))?;
        Ok(LifeLine { control, thread })
    }

    /// Ends it. This takes no longer than one attempt at an unreachable host.
    pub(super) fn end(self, ending: Ending) {
        self.control.end(ending);
        self.thread.thread().unpark();
        let _ = self.thread.join();
    }
}

/// The state of the thread.
struct Watcher {
    control: Arc<LifeLineControl>,
    dial: Dial,
    silence: Arc<Silence>,
}

impl Watcher {
    fn run(self, mut wire: Wire) {
        loop {
            let broken = wire.watch(|| self.silence.end());
            if self.control.is_ending() {
                return self.finish(wire);
            }
            let why = match broken {
                Broken::Io(error) => error.to_string(),
                Broken::Silent => "it is silent".to_string(),
                Broken::Frame(error) => error.to_string(),
                Broken::Closed(reason) => reason,
            };
            self.silence.begin(Instant::now());
            match self.reconnect(&why) {
                Some(new) => wire = new,
                None => return self.finish(wire),
            }
        }
    }

    /// Retries until there is a new connection; `None` if there will be none, or none is wanted.
    fn reconnect(&self, why: &str) -> Option<Wire> {
        let member = &self.dial.hello;
        let mut attempts = Attempts::new(&self.dial, Instant::now() + FOREVER).ok()?;
        loop {
            match attempts.round(&self.silence) {
                Ok(Some(wire)) => {
                    tracing::warn!(%member, why, "the connection to the store was lost and restored");
                    return Some(wire);
                }
                Ok(None) => {}
                Err(error) => {
                    // The next request to the store gets the error.
                    tracing::debug!(%member, why, %error, "the connection to the store was lost");
                    return None;
                }
            }
            if self.control.is_ending() {
                return None;
            }
            std::thread::park_timeout(attempts.pause());
        }
    }

    fn finish(&self, mut wire: Wire) {
        if self.control.ending.load(Ordering::Acquire) == Ending::Goodbye as u8 {
            let _ = wire.say_bye();
        }
    }
}

/// Each attempt has its own limit; the thread retries as long as its owner wants.
const FOREVER: Duration = crate::worker_env::LONGEST_DURATION;
