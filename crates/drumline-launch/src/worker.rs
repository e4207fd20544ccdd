//! One worker: a process that the launcher started, its process group, and the pidfd that shows its end.
//!
//! The group's id is the worker's pid. It cannot be reused until the worker is reaped, even if the worker is dead. So a
//! group is signalled only before that, and whatever the worker left in it is killed just before reaping.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Rlimit, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};

use crate::placing::Cores;
use crate::prepare::{ChildSetup, Orphans, prepare};
use crate::pump::Output;

/// What to execute as one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkerSpec {
    /// Its rank in the job.
    pub rank: usize,
    /// The program to execute.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables on top of the launcher's own environment; `None` removes one.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// The file that it reads as stdin; empty if `None` or if the file cannot be opened.
    pub stdin: Option<PathBuf>,
    /// Descriptors it inherits, under the same numbers.
    #[serde(skip)]
    pub kept: Vec<Arc<OwnedFd>>,
    /// The cores it may run on; all of the launcher's if `None`.
    pub cores: Option<Cores>,
}

impl WorkerSpec {
    fn command(&self, output: &Output, limit: Rlimit, orphans: Orphans) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(self.stdin.as_deref().map_or_else(Stdio::null, opened));
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if *output != Output::Inherit {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let setup = ChildSetup {
            kept: self.kept.clone(),
            cores: self.cores.as_ref().map(Cores::to_set),
            limit,
            orphans,
        };
        prepare(&mut command, setup);
        command
    }
}

/// Opens the file for reading. A terminal does not become the controlling terminal, and opening a pipe without a writer
/// does not block.
fn opened(path: &Path) -> Stdio {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let blocking = |file: OwnedFd| {
        let flags = fcntl_getfl(&file)?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map(|()| file)
    };
    open(path, flags, Mode::empty()).and_then(blocking).map_or_else(|_| Stdio::null(), Stdio::from)
}

/// How a process ended, as the kernel reports it: a code or a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) core_dumped: bool,
    /// When the launcher noticed it.
    pub(crate) at: Instant,
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) rank: usize,
    pid: Pid,
    pub(crate) pidfd: OwnedFd,
    pub(crate) ended: Option<Ended>,
    /// The signals that the launcher has sent to stop it.
    stop_signals: Vec<Signal>,
}

impl Worker {
    /// Starts a worker that may open `limit` files. Returns it with the read ends of its stdout and stderr, if they are
    /// piped. The calling thread must outlive the worker (see [`crate::prepare`]).
    pub(crate) fn start(
        spec: &WorkerSpec,
        output: &Output,
        limit: Rlimit,
        orphans: Orphans,
    ) -> io::Result<(Self, Vec<OwnedFd>)> {
        let mut child = spec.command(output, limit, orphans).spawn()?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .inspect_err(|_| drop(child.kill().and_then(|()| child.wait())))?;
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let worker = Self { rank: spec.rank, pid, pidfd, ended: None, stop_signals: Vec::new() };
        Ok((worker, pipes.into_iter().flatten().collect()))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Signals the worker's whole group, unless it has been reaped.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.ended.is_some() {
            return Err(Errno::SRCH.into());
        }
        Ok(kill_process_group(self.pid, signal)?)
    }

    /// Whether the launcher has sent it this signal in order to stop it.
    pub(crate) fn was_stopped_with(&self, signal: i32) -> bool {
        self.stop_signals.iter().any(|sent| sent.as_raw() == signal)
    }

    /// Stops it with `signal`, and continues a suspended group, which could not react otherwise.
    pub(crate) fn stop(&mut self, signal: Signal) {
        self.stop_signals.push(signal);
        // A failure means that it has already ended, which the next reaping shows.
        let _ = self.signal(signal).and_then(|()| self.signal(Signal::CONT));
    }

    /// Waits until it has ended, reaped or not. Returns whether it did.
    pub(crate) fn wait_for_end(&self, within: Duration) -> bool {
        ends_within(&self.pidfd, within)
    }

    /// If it has ended: kills what is left of its group, reaps it and remembers how it ended.
    pub(crate) fn reap(&mut self) -> Option<Ended> {
        let id = || WaitId::PidFd(self.pidfd.as_fd());
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if self.ended.is_some() || !matches!(waitid(id(), peek), Ok(Some(_))) {
            return None;
        }
        let _ = kill_process_group(self.pid, Signal::KILL);
        let status = waitid(id(), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok().flatten()?;
        self.ended = Some(Ended {
            rank: self.rank,
            pid: self.pid(),
            code: status.exit_status(),
            signal: status.terminating_signal(),
            core_dumped: status.dumped(),
            at: Instant::now(),
        });
        self.ended
    }
}

/// Waits until the process behind `pidfd` has ended, reaped or not. Returns whether it did.
pub(crate) fn ends_within(pidfd: &OwnedFd, within: Duration) -> bool {
    let until = Instant::now() + within;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            polled => return polled.is_ok_and(|ready| ready > 0),
        }
    }
}
