//! The keeper of the round that runs here, and how long it may take to do as it is told.
//!
//! A keeper that does not answer is killed, and so its workers: an agent can always be stopped, whatever has become of
//! the processes below it.

use std::ffi::OsString;
use std::io;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::Happening;
use crate::keeper::{Keeper, Parting, Start, Told};

/// How long a keeper may take to kill, and to tell of it: longer than it waits for workers that cannot be killed.
const KILLED: Duration = Duration::from_secs(12);

#[derive(Debug)]
pub(super) struct RoundKeeper {
    round: u64,
    keeper: Keeper,
    /// What it was told last.
    lease: Option<Duration>,
    /// When it must have answered.
    due: Option<Instant>,
}

impl RoundKeeper {
    pub(super) fn start(
        command: &[OsString],
        round: u64,
        start: Start,
        news: Sender<Happening>,
    ) -> io::Result<Self> {
        let lease = start.lease;
        let keeper = Keeper::start(command, round, start, news)?;
        Ok(Self { round, keeper, lease, due: None })
    }

    pub(super) fn round(&self) -> u64 {
        self.round
    }

    pub(super) fn pid(&self) -> Pid {
        self.keeper.pid()
    }

    /// Stops the workers: `signal` once they have had time to `settle`, and after `grace` SIGKILL.
    pub(super) fn stop(&mut self, signal: Signal, settle: Duration, grace: Duration) {
        let told = self.keeper.stop(signal, settle, grace);
        self.expect(told, grace.saturating_add(settle + KILLED));
    }

    pub(super) fn kill(&mut self) {
        let told = self.keeper.kill();
        self.expect(told, KILLED);
    }

    /// Hands a signal on to the workers. To one that does not listen it is lost, as signals are.
    pub(super) fn pass_on(&self, signal: Signal) {
        let _ = self.keeper.signal(signal);
    }

    /// The workers may run until this moment. One that does not listen keeps the old lease, which is right.
    pub(super) fn renew(&mut self, lease: Duration) {
        if self.lease != Some(lease) && self.keeper.lease(lease) == Told::Said {
            self.lease = Some(lease);
        }
    }

    /// It has answered: nothing runs any more.
    pub(super) fn is_over(&mut self) {
        self.due = None;
    }

    /// Kills it if it has not answered in time.
    pub(super) fn enforce(&mut self) {
        if self.due.is_some_and(|due| Instant::now() >= due) {
            tracing::warn!(round = self.round, "the keeper does not answer: killing it");
            self.keeper.force();
            self.due = None;
        }
    }

    pub(super) fn finish(self) -> Parting {
        self.keeper.finish()
    }

    fn expect(&mut self, told: Told, within: Duration) {
        if told == Told::Deaf {
            self.keeper.force();
        }
        let due = Instant::now().checked_add(within);
        self.due = self.due.into_iter().chain(due).min();
    }
}
