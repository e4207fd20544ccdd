//! A member's life line: the connection whose end tells the server that the process has died.
//!
//! ```text
//!  watch: ping, pong, ping, …  ── broken or silent ─▶ dial as `Resumed` ── let in ─▶ watch
//!                                                          └─ refused, or nobody listens ─▶ the end
//! ```
//! A network can break a connection while both ends live. The server then waits a moment before it reports the member
//! as lost, so the break must be noticed here at once, whether or not the program is asking anything. That takes a thread;
//! its owner is the [`TcpStore`](super::TcpStore), which ends and joins it.
//!
//! A connection that is merely silent is kept until there is a new one: the server's process may just stand still, and
//! then a goodbye over the old one is heard later.

use super::dial::{Dial, Tries};
use super::silence::Silence;
use super::wire::{Broken, Wire, wake};
use crate::client_note::Line;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How the life line is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// With a goodbye: the end of this process is no loss.
    Goodbye = 1,
    /// Without one.
    Silent = 2,
}

/// Watches the life line, and makes it again when it breaks.
#[derive(Debug)]
pub(super) struct LifeLine {
    reins: Arc<Reins>,
    thread: JoinHandle<()>,
}

/// By what the owner ends the thread, whatever it waits for.
#[derive(Debug, Default)]
pub(super) struct Reins {
    /// 0, or an [`Ending`].
    ending: AtomicU8,
    /// The connection that is read from now.
    stream: Mutex<Option<TcpStream>>,
}

impl Reins {
    /// This is the connection that is read from now.
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
    /// Watches `wire` from now on; `dial` is the way to the server.
    pub(super) fn start(wire: Wire, dial: &Dial, silence: Arc<Silence>) -> io::Result<LifeLine> {
        let reins = Arc::new(Reins::default());
        wire.attach_to(&reins);
        let dial = Dial { reins: Some(reins.clone()), ..dial.line(Line::Resumed) };
        let keeper = Keeper { reins: reins.clone(), dial, silence };
        let thread =
            std::thread::Builder::new().name("drumline-life".into()).spawn(move || keeper.run(wire))?;
        Ok(LifeLine { reins, thread })
    }

    /// Ends it. Takes no longer than one try at a host that cannot be reached.
    pub(super) fn end(self, ending: Ending) {
        self.reins.end(ending);
        self.thread.thread().unpark();
        let _ = self.thread.join();
    }
}

/// What the thread has.
struct Keeper {
    reins: Arc<Reins>,
    dial: Dial,
    silence: Arc<Silence>,
}

impl Keeper {
    fn run(self, mut wire: Wire) {
        loop {
            let broken = wire.watch(|| self.silence.broken());
            if self.reins.is_ending() {
                return self.part(wire);
            }
            let why = match broken {
                Broken::Io(error) => error.to_string(),
                Broken::Silent => "nothing comes from it".to_string(),
                Broken::Frame(error) => error.to_string(),
                Broken::Closed(reason) => reason,
            };
            self.silence.noticed(Instant::now());
            match self.dial_again(&why) {
                Some(new) => wire = new,
                None => return self.part(wire),
            }
        }
    }

    /// Tries until there is a new connection; `None` if there will be none, or none is wanted.
    fn dial_again(&self, why: &str) -> Option<Wire> {
        let member = &self.dial.hello;
        let mut tries = Tries::new(&self.dial, Instant::now() + FOR_EVER).ok()?;
        loop {
            match tries.round(&self.silence) {
                Ok(Some(wire)) => {
                    tracing::warn!(%member, why, "the connection to the store was lost, and made again");
                    return Some(wire);
                }
                Ok(None) => {}
                Err(error) => {
                    // Whoever asks the store for something next gets the error.
                    tracing::debug!(%member, why, %error, "the connection to the store was lost");
                    return None;
                }
            }
            if self.reins.is_ending() {
                return None;
            }
            std::thread::park_timeout(tries.pause());
        }
    }

    fn part(&self, mut wire: Wire) {
        if self.reins.ending.load(Ordering::Acquire) == Ending::Goodbye as u8 {
            let _ = wire.say_bye();
        }
    }
}

/// Each try has its own limit; the thread tries for as long as its owner wants it.
const FOR_EVER: Duration = crate::worker_env::LONGEST_DURATION;
