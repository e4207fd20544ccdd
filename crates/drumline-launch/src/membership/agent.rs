//! The state machine of an agent: it follows orders, decides what to do with the node's workers, and stops them by
//! itself when it loses contact.
//!
//! ```text
//!   order, tick, end of workers ─▶ step ─▶ start · stop · send a report · exit
//! ```

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;

use super::message::{AgentCard, Doing, Instruction, Order, Report, Round, WorkerFailure};
use super::policy::Policy;
use super::reason::{Cause, Ending, Reason};

/// An event for an agent.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// An order arrived.
    Order(Order),
    /// All workers of this round succeeded.
    WorkersDone(u64),
    /// A worker failed; the others of this node may still run.
    WorkerFailed(WorkerFailure),
    /// No worker of this round is alive any more, after a stop.
    WorkersStopped(u64),
    /// It is proved that the process of the agent that hosts the store has ended.
    StoreDied,
    /// The agent is asked to leave.
    Leave,
}

/// How much time workers get to stop; the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Grace {
    /// They are killed at once.
    None,
    /// They get a second or two.
    Short,
    /// They get the whole shutdown timeout.
    Full,
}

/// An action that the agent must carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Start this node's workers for the round.
    Start(Round),
    /// Stop the workers; answered by [`Event::WorkersStopped`]. A second one shortens the grace time.
    Stop {
        /// The round whose workers to stop.
        round: u64,
        /// How much time they get.
        grace: Grace,
        /// Why.
        why: Reason,
    },
    /// Send this report to the coordinator.
    Send(Report),
    /// Exit, with this ending.
    Exit(Ending),
}

/// A gap of this length between two steps means that this process was paused (SIGSTOP): the silence was its own.
pub(super) const PAUSED: Duration = Duration::from_secs(1);

/// What an agent decides when it has no contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnDecision {
    Keep,
    Stop,
    Kill,
    GiveUp,
}

/// The state machine of an agent.
#[derive(Debug)]
pub struct Agent {
    card: AgentCard,
    policy: Policy,
    coordinator: Option<u128>,
    reports: u64,
    /// Reports sent within the last lease, with the time at which they were sent.
    sent: VecDeque<(u64, Duration)>,
    next_report: Duration,
    /// When the latest answered report was sent; before the first answer, when the agent began.
    contact: Duration,
    last_step: Duration,
    doing: Doing,
    stop_grace: Grace,
    fence: u64,
    /// How many restarts the job had used when this agent last ran a round.
    restarts: Option<usize>,
    leaving: bool,
    failure: Option<WorkerFailure>,
    ending: Option<Ending>,
    acts: Vec<Act>,
}

impl Agent {
    /// An agent that wants to take part; `now` is the time on its own monotonic clock, here and below.
    pub fn new(card: AgentCard, policy: Policy, now: Duration) -> Self {
        Agent {
            card,
            policy,
            coordinator: None,
            reports: 0,
            sent: VecDeque::new(),
            next_report: now,
            contact: now,
            last_step: now,
            doing: Doing::Idle,
            stop_grace: Grace::Full,
            fence: 0,
            restarts: None,
            leaving: false,
            failure: None,
            ending: None,
            acts: Vec::new(),
        }
    }

    /// What it is doing.
    pub fn doing(&self) -> Doing {
        self.doing
    }

    /// When its workers must be killed unless the lease is renewed; `None` without a lease.
    ///
    /// After each step, the caller passes this time to a watch that keeps running when the agent's process is paused.
    pub fn lease_end(&self) -> Option<Duration> {
        self.coordinator.map(|_| self.contact + self.policy.lease)
    }

    /// Processes an event, and returns the actions to carry out, in this order.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<Act> {
        let before = (self.doing, self.fence, self.is_leased(now), self.leaving);
        if self.doing == Doing::Over {
            return Vec::new();
        }
        self.discount_own_pause(now);
        self.act_on_silence(now);
        self.handle(now, event);
        let is_changed = before != (self.doing, self.fence, self.is_leased(now), self.leaving);
        if is_changed || now >= self.next_report {
            let report = self.report(now);
            self.acts.push(Act::Send(report));
        }
        if let (Doing::Over, Some(ending)) = (self.doing, &self.ending) {
            self.acts.push(Act::Exit(ending.clone()));
        }
        std::mem::take(&mut self.acts)
    }

    /// What to do about the silence of the coordinator, and why.
    fn decide_on_silence(&self, now: Duration) -> (OwnDecision, Reason) {
        let span = now.saturating_sub(self.contact);
        match self.doing.alive() {
            Some(_) if !self.is_leased(now) => (OwnDecision::Kill, Reason::LeaseOver),
            Some(_) if span >= self.policy.patience => (OwnDecision::Stop, Reason::StoreLost { span }),
            None if span >= self.gives_up_after() => (OwnDecision::GiveUp, Reason::StoreLost { span }),
            _ => (OwnDecision::Keep, Reason::Quiet),
        }
    }

    fn act_on_silence(&mut self, now: Duration) {
        match self.decide_on_silence(now) {
            (OwnDecision::Keep, _) => {}
            (OwnDecision::Stop, why) => self.stop(Grace::Short, why),
            (OwnDecision::Kill, why) => self.stop(Grace::None, why),
            (OwnDecision::GiveUp, _) if self.leaving => self.end(Ending::Left),
            (OwnDecision::GiveUp, why) => self.end(Ending::Failure(why)),
        }
    }

    /// How long it waits for the coordinator once nothing runs here.
    pub fn gives_up_after(&self) -> Duration {
        let Policy { join_timeout, leave_within, give_up_after, max_restarts, .. } = self.policy;
        let may_return = self.policy.is_elastic() || self.restarts.is_none_or(|used| used < max_restarts);
        match self.coordinator {
            None => join_timeout,
            Some(_) if self.leaving => leave_within,
            Some(_) if may_return => join_timeout.max(give_up_after),
            Some(_) => give_up_after,
        }
    }

    /// How long no report has been answered.
    pub fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.contact)
    }

    fn is_leased(&self, now: Duration) -> bool {
        self.lease_end().is_some_and(|end| now < end)
    }

    /// If the agent itself was paused (SIGSTOP), it gives the coordinator a chance to answer before it gives up. Its
    /// lease is over all the same: a report sent before the pause renews nothing.
    fn discount_own_pause(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        let lease_start = now.saturating_sub(self.policy.lease);
        if gap > PAUSED && self.contact < lease_start {
            self.contact = (self.contact + gap).min(lease_start);
        }
    }

    fn handle(&mut self, now: Duration, event: Event) {
        match event {
            Event::Tick => {}
            Event::Order(order) => self.follow(now, order),
            Event::WorkersDone(round) if self.doing == Doing::Running(round) => {
                self.doing = Doing::Done(round);
                self.fence = self.fence.max(round);
            }
            Event::WorkerFailed(failure) if self.doing == Doing::Running(failure.round) => {
                self.stop(Grace::Full, Reason::Closing(Cause::Failed(failure.clone())));
                self.failure = Some(failure);
            }
            Event::WorkersStopped(round) if self.doing.alive() == Some(round) => {
                self.fence = self.fence.max(round);
                self.doing = if self.ending.is_some() { Doing::Over } else { Doing::Idle };
            }
            Event::StoreDied if self.leaving => self.end(Ending::Left),
            Event::StoreDied => self.end(Ending::Failure(Reason::StoreDied)),
            Event::Leave => {
                self.leaving = true;
                self.stop(Grace::Full, Reason::AskedToLeave);
            }
            Event::WorkersDone(_) | Event::WorkerFailed(_) | Event::WorkersStopped(_) => {}
        }
    }

    fn follow(&mut self, now: Duration, order: Order) {
        let is_other_coordinator = self.coordinator.is_some_and(|known| known != order.coordinator);
        if is_other_coordinator {
            return;
        }
        // An order that answers a report older than the lease grants nothing: it was delayed for too long.
        self.forget_old_reports(now);
        let answered = self.sent.iter().find(|(number, _)| *number == order.answers);
        let Some((_, sent)) = answered.copied() else { return };
        self.coordinator = Some(order.coordinator);
        self.contact = self.contact.max(sent);
        match order.instruction {
            // The ending is final, but contact lets the workers use their grace time.
            _ if self.ending.is_some() => {}
            Instruction::Hold { fence, why } => self.hold(fence, why),
            Instruction::Run(round) => self.run(round),
            Instruction::Keep => {}
            Instruction::End(ending) => self.end(ending),
        }
    }

    fn hold(&mut self, fence: u64, why: Reason) {
        self.fence = self.fence.max(fence);
        self.failure.take_if(|failure| failure.round <= fence);
        match self.doing {
            Doing::Running(round) | Doing::Stopping(round) if round <= fence => self.stop(Grace::Full, why),
            Doing::Done(round) if round <= fence => self.doing = Doing::Idle,
            _ => {}
        }
    }

    fn run(&mut self, round: Round) {
        if self.doing == Doing::Idle && round.number > self.fence && !self.leaving {
            self.doing = Doing::Running(round.number);
            self.stop_grace = Grace::Full;
            self.failure = None;
            self.restarts = Some(round.restarts);
            // Rounds between the last one and this one were formed without this agent.
            self.fence = round.number - 1;
            self.acts.push(Act::Start(round));
        }
    }

    fn end(&mut self, ending: Ending) {
        self.ending = Some(ending.clone());
        match self.doing.alive() {
            Some(_) => self.stop(Grace::Full, Reason::JobOver(Box::new(ending))),
            None => self.doing = Doing::Over,
        }
    }

    /// Stops the workers, if any, or shortens the grace time of a stop in progress.
    fn stop(&mut self, grace: Grace, why: Reason) {
        let Some(round) = self.doing.alive() else { return };
        if self.doing == Doing::Running(round) || grace < self.stop_grace {
            self.doing = Doing::Stopping(round);
            self.stop_grace = grace;
            self.acts.push(Act::Stop { round, grace, why });
        }
    }

    fn forget_old_reports(&mut self, now: Duration) {
        let lease = self.policy.lease;
        self.sent.retain(|(_, at)| now < *at + lease);
    }

    fn report(&mut self, now: Duration) -> Report {
        self.reports += 1;
        self.next_report = now + self.policy.heartbeat;
        self.forget_old_reports(now);
        self.sent.push_back((self.reports, now));
        Report {
            agent: self.card.clone(),
            number: self.reports,
            doing: self.doing,
            fence: self.fence,
            leased: self.is_leased(now),
            leaving: self.leaving,
            failure: self.failure.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
