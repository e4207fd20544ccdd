//! An agent: hears orders, says what to do with the node's workers, and stops them by itself when it hears nothing.
//!
//! ```text
//!   order, tick, end of workers ─▶ step ─▶ start · stop · send a report · exit
//! ```

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;

use super::message::{AgentCard, Doing, Order, Report, Round, Wish, WorkerFailure};
use super::policy::Policy;
use super::reason::{Cause, Ending, Reason};

/// What happens to an agent.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// An order came.
    Order(Order),
    /// All workers of this round ended well.
    WorkersDone(u64),
    /// A worker failed; the others of this node may still run.
    WorkerFailed(WorkerFailure),
    /// No worker of this round is alive any more, as was asked for.
    WorkersStopped(u64),
    /// The process of the agent that hosts the store is proved dead.
    StoreDied,
    /// The agent is asked to leave.
    Leave,
}

/// How gently workers are stopped; the least gentle first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Grace {
    /// Killed at once.
    None,
    /// With a second or two.
    Short,
    /// With the whole shutdown time.
    Full,
}

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Start this node's workers for the round.
    Start(Round),
    /// Stop the workers; answered by [`Event::WorkersStopped`]. A second one is in more of a hurry.
    Stop {
        /// Whose workers.
        round: u64,
        /// How gently.
        grace: Grace,
        /// Why.
        why: Reason,
    },
    /// Send this to the coordinator.
    Send(Report),
    /// Go, with this ending.
    Exit(Ending),
}

/// Whoever looks at the clock this late has stood still (SIGSTOP): the silence was its own.
pub(super) const STOOD_STILL: Duration = Duration::from_secs(1);

/// What an agent decides by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alone {
    Keep,
    Stop,
    Kill,
    GiveUp,
}

/// One node's view.
#[derive(Debug)]
pub struct Agent {
    card: AgentCard,
    policy: Policy,
    coordinator: Option<u128>,
    reports: u64,
    /// Reports sent within the last lease, with the time at which they were sent.
    sent: VecDeque<(u64, Duration)>,
    next_report: Duration,
    /// When the latest answered report was sent; at first, when the agent began.
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

    /// What it is about.
    pub fn doing(&self) -> Doing {
        self.doing
    }

    /// When its workers must be killed unless the lease is renewed; `None` without a lease.
    ///
    /// Whoever acts for the agent passes this on, after each step, to a watch that goes on when the agent's process
    /// stands still.
    pub fn lease_end(&self) -> Option<Duration> {
        self.coordinator.map(|_| self.contact + self.policy.lease)
    }

    /// Takes in an event, and says what to do, in this order.
    pub fn step(&mut self, now: Duration, event: Event) -> Vec<Act> {
        let before = (self.doing, self.fence, self.is_leased(now), self.leaving);
        if self.doing == Doing::Over {
            return Vec::new();
        }
        self.forgive_own_sleep(now);
        self.alone(now);
        self.take(now, event);
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

    /// Why the lease or the patience is over, if it is.
    fn decide_alone(&self, now: Duration) -> (Alone, Reason) {
        let span = now.saturating_sub(self.contact);
        match self.doing.alive() {
            Some(_) if !self.is_leased(now) => (Alone::Kill, Reason::LeaseOver),
            Some(_) if span >= self.policy.patience => (Alone::Stop, Reason::StoreLost { span }),
            None if span >= self.gives_up_after() => (Alone::GiveUp, Reason::StoreLost { span }),
            _ => (Alone::Keep, Reason::Quiet),
        }
    }

    fn alone(&mut self, now: Duration) {
        match self.decide_alone(now) {
            (Alone::Keep, _) => {}
            (Alone::Stop, why) => self.stop(Grace::Short, why),
            (Alone::Kill, why) => self.stop(Grace::None, why),
            (Alone::GiveUp, _) if self.leaving => self.end(Ending::Left),
            (Alone::GiveUp, why) => self.end(Ending::Failure(why)),
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

    /// For how long no report has been answered.
    pub fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.contact)
    }

    fn is_leased(&self, now: Duration) -> bool {
        self.lease_end().is_some_and(|end| now < end)
    }

    /// An agent that stood still (SIGSTOP) gives the coordinator the chance to answer before it gives up. Its lease
    /// is over all the same: a report sent before the sleep renews nothing.
    fn forgive_own_sleep(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        let longest = now.saturating_sub(self.policy.lease);
        if gap > STOOD_STILL && self.contact < longest {
            self.contact = (self.contact + gap).min(longest);
        }
    }

    fn take(&mut self, now: Duration, event: Event) {
        match event {
            Event::Tick => {}
            Event::Order(order) => self.obey(now, order),
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

    fn obey(&mut self, now: Duration, order: Order) {
        let is_stranger = self.coordinator.is_some_and(|known| known != order.coordinator);
        if is_stranger {
            return;
        }
        // An order that answers a report older than the lease grants nothing: it was under way for too long.
        self.forget_old_reports(now);
        let answered = self.sent.iter().find(|(number, _)| *number == order.answers);
        let Some((_, sent)) = answered.copied() else { return };
        self.coordinator = Some(order.coordinator);
        self.contact = self.contact.max(sent);
        match order.wish {
            // The end stands; but contact lets the workers have their grace.
            _ if self.ending.is_some() => {}
            Wish::Hold { fence, why } => self.hold(fence, why),
            Wish::Run(round) => self.run(round),
            Wish::Keep => {}
            Wish::End(ending) => self.end(ending),
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
            (self.stop_grace, self.failure) = (Grace::Full, None);
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

    /// Stops the workers, if any, or hurries a stop that is under way.
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
