//! The keeper of the current round, with a time limit for its answers.
//!
//! A keeper that does not answer is killed, and its workers with it. So an agent can always be stopped, whatever state
//! the processes below it are in.

use std::ffi::OsString;
use std::io;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::AgentEvent;
use crate::keeper::{Delivery, Keeper, KeeperExit, Start};

/// How long a keeper may take to kill its workers and report it: longer than it waits for workers that cannot be
/// killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(12);

#[derive(Debug)]
pub(super) struct RoundKeeper {
    round: u64,
    keeper: Keeper,
    /// The last lease that was sent to it.
    lease: Option<Duration>,
    /// The time by which it must have answered.
    due: Option<Instant>,
}

impl RoundKeeper {
    pub(super) fn start(
        command: &[OsString],
        round: u64,
        start: Start,
        events: Sender<AgentEvent>,
    ) -> io::Result<Self> {
        let lease = start.lease;
        let keeper = Keeper::start(command, round, start, events)?;
        Ok(Self { round, keeper, lease, due: None })
    }

    pub(super) fn round(&self) -> u64 {
        self.round
    }

    pub(super) fn pid(&self) -> Pid {
        self.keeper.pid()
    }

    /// Stops the workers: sends `signal` once they have had time to `settle`, and SIGKILL after `grace`.
    pub(super) fn stop(&mut self, signal: Signal, settle: Duration, grace: Duration) {
        let delivery = self.keeper.stop(signal, settle, grace);
        self.expect_answer(delivery, grace.saturating_add(settle + KILL_TIMEOUT));
    }

    pub(super) fn kill(&mut self) {
        let delivery = self.keeper.kill();
        self.expect_answer(delivery, KILL_TIMEOUT);
    }

    /// Forwards a signal to the workers. If the keeper does not respond, the signal is lost.
    pub(super) fn forward(&self, signal: Signal) {
        let _ = self.keeper.signal(signal);
    }

    /// Lets the workers run until this time. If the keeper does not respond, the old lease stays in force.
    pub(super) fn renew(&mut self, lease: Duration) {
        if self.lease != Some(lease) && self.keeper.lease(lease) == Delivery::Sent {
            self.lease = Some(lease);
        }
    }

    /// The keeper has answered: no worker runs any more.
    pub(super) fn mark_over(&mut self) {
        self.due = None;
    }

    /// Kills the keeper if it has not answered in time.
    pub(super) fn enforce(&mut self) {
        if self.due.is_some_and(|due| Instant::now() >= due) {
            tracing::warn!(round = self.round, "the keeper does not answer; killing it");
            self.keeper.force();
            self.due = None;
        }
    }

    pub(super) fn finish(self) -> KeeperExit {
        self.keeper.finish()
    }

    fn expect_answer(&mut self, delivery: Delivery, within: Duration) {
        if delivery == Delivery::Unresponsive {
            self.keeper.force();
        }
        let due = Instant::now().checked_add(within);
        self.due = self.due.into_iter().chain(due).min();
    }
}
