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

use super::protocol::{KeeperCommand, KeeperReport, Start, frame, receive, send};
use crate::agent::AgentEvent;
use crate::worker::ends_within;

/// How long a keeper may take to exit once it only has to kill its workers.
const EXIT_TIMEOUT: Duration = Duration::from_secs(12);

/// A round's keeper. Dropping it kills what still runs.
#[derive(Debug)]
pub(crate) struct Keeper {
    socket: UnixStream,
    child: Child,
}

/// How a keeper ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeeperExit {
    /// It exited by itself, and left no process behind.
    Clean,
    /// It was killed. Processes that the workers had started may be left.
    Killed,
}

/// Whether a command was sent to a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    Sent,
    /// The keeper has not read its socket for long: it is frozen, or gone.
    Unresponsive,
}

impl Keeper {
    /// Starts `command` as the keeper of a round. Its reports arrive in `events`.
    pub(crate) fn start(
        command: &[OsString],
        round: u64,
        start: Start,
        events: Sender<AgentEvent>,
    ) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        // In a list of processes it appears as `drumline`, not with the path by which it was executed.
        let mut keeper = Command::new(program);
        keeper.arg0("drumline").args(args);
        // For the store that the keeper hosts; the workers have this variable in their own environment.
        keeper.env(DRUMLINE_HOST_TIMEOUT, format!("{}s", start.store.host_timeout.as_secs_f64()));
        let child = keeper.stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?;
        let keeper = Self { socket, child };
        let reports = keeper.socket.try_clone()?;
        std::thread::Builder::new().name("drumline-keeper".to_string()).spawn(move || {
            while let Ok(Some(report)) = receive::<KeeperReport>(&reports) {
                let _ = events.send(AgentEvent::KeeperReport(round, Box::new(report)));
            }
            let _ = events.send(AgentEvent::KeeperExited(round));
        })?;
        send(&keeper.socket, &KeeperCommand::Start(Box::new(start)))?;
        Ok(keeper)
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Stops the workers: sends `signal` once they have had time to `settle`, and SIGKILL after `grace`.
    pub(crate) fn stop(&self, signal: Signal, settle: Duration, grace: Duration) -> Delivery {
        self.command(&KeeperCommand::Stop { signal: signal.as_raw(), settle, grace })
    }

    /// Forwards a signal to the workers.
    pub(crate) fn signal(&self, signal: Signal) -> Delivery {
        self.command(&KeeperCommand::Signal(signal.as_raw()))
    }

    pub(crate) fn kill(&self) -> Delivery {
        self.command(&KeeperCommand::Kill)
    }

    /// Lets the workers run until this time.
    pub(crate) fn lease(&self, until: Duration) -> Delivery {
        self.command(&KeeperCommand::Lease(until))
    }

    /// Kills the keeper itself, and its workers with it.
    pub(crate) fn force(&mut self) {
        // An error means that it has already ended.
        let _ = self.child.kill();
    }

    /// Ends the keeper; it kills what still runs.
    pub(crate) fn finish(mut self) -> KeeperExit {
        self.end()
    }

    /// Sends a command without ever blocking: a frozen keeper must not freeze its agent.
    fn command(&self, command: &KeeperCommand) -> Delivery {
        let sent = frame(command).and_then(|frame| {
            let sent = send_bytes(&self.socket, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
            Ok(sent == frame.len())
        });
        if matches!(sent, Ok(true)) { Delivery::Sent } else { Delivery::Unresponsive }
    }

    fn wait(&self, within: Duration) -> bool {
        pidfd_open(self.pid(), PidfdFlags::empty()).map_or(true, |pidfd| ends_within(&pidfd, within))
    }

    fn end(&mut self) -> KeeperExit {
        let began = Instant::now();
        let _ = self.command(&KeeperCommand::Bye);
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let mut exit = KeeperExit::Clean;
        if !self.wait(EXIT_TIMEOUT) {
            tracing::warn!(pid = self.child.id(), waited = ?began.elapsed(), "the keeper does not exit; killing it");
            self.force();
            exit = KeeperExit::Killed;
        }
        // The wait is bounded, as a process may be impossible to kill.
        if self.wait(Duration::from_secs(1)) && self.child.wait().is_ok_and(|status| !status.success()) {
            exit = KeeperExit::Killed;
        }
        exit
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end();
    }
}
