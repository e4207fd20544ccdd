//! The agent's side of a keeper.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use drumline_rendezvous::worker_env::DRUMLINE_HOST_TIMEOUT;
use rustix::net::{SendFlags, send as send_bytes};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::protocol::{News, Start, Wish, frame, receive, send};
use crate::agent::Happening;
use crate::worker::ends_within;

/// How long a keeper may take to go once it has nothing to do but to kill.
const PATIENCE: Duration = Duration::from_secs(12);

/// A round's keeper. Dropping it kills what still runs.
#[derive(Debug)]
pub(crate) struct Keeper {
    socket: UnixStream,
    child: Child,
}

/// How a keeper went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parting {
    /// By itself, with nothing left.
    Tidy,
    /// It had to be killed: what the workers had started may be left.
    Forced,
}

/// Whether a keeper could be told something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Said,
    /// It has not read for long: it is frozen, or gone.
    Deaf,
}

impl Keeper {
    /// Starts `command` as the keeper of a round. What it sees arrives in `news`.
    pub(crate) fn start(
        command: &[OsString],
        round: u64,
        start: Start,
        news: Sender<Happening>,
    ) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // In a list of processes it says what it is, and not by which path it was executed.
        let mut keeper = Command::new(program);
        keeper.arg0("drumline").args(args);
        // For the store that it hosts; the workers have it in their own environment.
        keeper.env(DRUMLINE_HOST_TIMEOUT, format!("{}s", start.store.host_timeout.as_secs_f64()));
        let child = keeper.stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?;
        let keeper = Self { socket, child };
        let ear = keeper.socket.try_clone()?;
        std::thread::Builder::new().name("drumline-keeper".to_string()).spawn(move || {
            while let Ok(Some(heard)) = receive::<News>(&ear) {
                let _ = news.send(Happening::News(round, Box::new(heard)));
            }
            let _ = news.send(Happening::KeeperGone(round));
        })?;
        send(&keeper.socket, &Wish::Start(Box::new(start)))?;
        Ok(keeper)
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Stops the workers: `signal` once they have had time to `settle`, and after `grace` SIGKILL.
    pub(crate) fn stop(&self, signal: Signal, settle: Duration, grace: Duration) -> Told {
        self.tell(&Wish::Stop { signal: signal.as_raw(), settle, grace })
    }

    /// Hands a signal on to the workers.
    pub(crate) fn signal(&self, signal: Signal) -> Told {
        self.tell(&Wish::Signal(signal.as_raw()))
    }

    pub(crate) fn kill(&self) -> Told {
        self.tell(&Wish::Kill)
    }

    /// The workers may run until this moment.
    pub(crate) fn lease(&self, until: Duration) -> Told {
        self.tell(&Wish::Lease(until))
    }

    /// Kills the keeper itself, and so its workers.
    pub(crate) fn force(&mut self) {
        // An error: it has ended.
        let _ = self.child.kill();
    }

    /// Lets it go: what still runs is killed.
    pub(crate) fn finish(mut self) -> Parting {
        self.part()
    }

    /// Never waits: an agent must not stand still because its keeper does.
    fn tell(&self, wish: &Wish) -> Told {
        let said = frame(wish).and_then(|frame| {
            let sent = send_bytes(&self.socket, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
            Ok(sent == frame.len())
        });
        if matches!(said, Ok(true)) { Told::Said } else { Told::Deaf }
    }

    fn wait(&self, within: Duration) -> bool {
        pidfd_open(self.pid(), PidfdFlags::empty()).map_or(true, |pidfd| ends_within(&pidfd, within))
    }

    fn part(&mut self) -> Parting {
        let began = Instant::now();
        let _ = self.tell(&Wish::Bye);
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let mut parting = Parting::Tidy;
        if !self.wait(PATIENCE) {
            tracing::warn!(pid = self.child.id(), waited = ?began.elapsed(), "the keeper does not end: killing it");
            self.force();
            parting = Parting::Forced;
        }
        // One that cannot be killed is not waited for without end.
        if self.wait(Duration::from_secs(1)) && self.child.wait().is_ok_and(|status| !status.success()) {
            parting = Parting::Forced;
        }
        parting
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.part();
    }
}
