//! The agent's side of a keeper.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::protocol::{News, Start, Wish, receive, send};
use crate::agent::Happening;

/// How long a keeper may take to go once it has nothing to do but to kill.
const PATIENCE: Duration = Duration::from_secs(12);

/// A round's keeper. Dropping it kills what still runs.
#[derive(Debug)]
pub(crate) struct Keeper {
    socket: UnixStream,
    child: Child,
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
        let child = Command::new(program).args(args).stdin(Stdio::from(OwnedFd::from(theirs))).spawn()?;
        let keeper = Self { socket, child };
        let ear = keeper.socket.try_clone()?;
        std::thread::Builder::new().name("drumline-keeper".to_string()).spawn(move || {
            while let Ok(Some(heard)) = receive::<News>(&ear) {
                let _ = news.send(Happening::News(round, Box::new(heard)));
            }
            let _ = news.send(Happening::KeeperGone(round));
        })?;
        keeper.say(&Wish::Start(Box::new(start)))?;
        Ok(keeper)
    }

    /// Stops the workers: `signal`, and after `grace` SIGKILL.
    pub(crate) fn stop(&self, signal: Signal, grace: Duration) {
        self.tell(&Wish::Stop { signal: signal.as_raw(), grace });
    }

    /// Hands a signal on to the workers.
    pub(crate) fn signal(&self, signal: Signal) {
        self.tell(&Wish::Signal(signal.as_raw()));
    }

    pub(crate) fn kill(&self) {
        self.tell(&Wish::Kill);
    }

    /// The workers may run until this moment.
    pub(crate) fn lease(&self, until: Duration) {
        self.tell(&Wish::Lease(until));
    }

    fn say(&self, wish: &Wish) -> io::Result<()> {
        send(&self.socket, wish)
    }

    /// A keeper that cannot be told anything is gone, which its reader reports.
    fn tell(&self, wish: &Wish) {
        let _ = self.say(wish);
    }

    fn wait(&self, within: Duration) -> bool {
        let pid = Pid::from_child(&self.child);
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
        let within = Timespec::try_from(within).ok();
        poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], within.as_ref()).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let began = Instant::now();
        self.tell(&Wish::Bye);
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        if !self.wait(PATIENCE) {
            tracing::warn!(pid = self.child.id(), waited = ?began.elapsed(), "the keeper does not end: killing it");
            let _ = self.child.kill();
        }
        // A frozen or unkillable keeper is not waited for without end.
        if self.wait(Duration::from_secs(1)) {
            let _ = self.child.wait();
        }
    }
}
