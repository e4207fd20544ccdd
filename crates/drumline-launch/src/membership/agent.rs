//! An agent: hears orders, says what to do with the node's workers, and stops them by itself when it hears nothing.
//!
//! ```text
//!   order, tick, end of workers ─▶ step ─▶ start · stop · send a report · exit
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use super::message::{AgentCard, Doing, Order, Report, Round, Wish, WorkerFailure};
use super::policy::Policy;
use super::reason::{Ending, Reason};

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
    /// The agent is asked to leave.
    Leave,
}

/// How gently workers are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grace {
    /// With the whole shutdown time.
    Full,
    /// With a second or two.
    Short,
    /// Killed at once.
    None,
}

/// What an agent is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Start this node's workers for the round.
    Start(Round),
    /// Stop the workers of this round; answered by [`Event::WorkersStopped`]. A second one is in more of a hurry.
    Stop(u64, Grace),
    /// Send this to the coordinator.
    Send(Report),
    /// Go, with this ending.
    Exit(Ending),
}

/// What an agent decides by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alone {
    Keep,
    Kill(u64),
    GiveUp,
}

/// One node's view.
#[derive(Debug)]
pub struct Agent {
    card: AgentCard,
    policy: Policy,
    coordinator: Option<u128>,
    last_order: u64,
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
    leaving: bool,
    failure: Option<WorkerFailure>,
    ending: Option<Ending>,
}

impl Agent {
    /// An agent that wants to take part; `now` is the time on its own monotonic clock, here and below.
    pub fn new(card: AgentCard, policy: Policy, now: Duration) -> Self {
        Agent {
            card,
            policy,
            coordinator: None,
            last_order: 0,
            reports: 0,
            sent: VecDeque::new(),
            next_report: now,
            contact: now,
            last_step: now,
            doing: Doing::Idle,
            stop_grace: Grace::Full,
            fence: 0,
            leaving: false,
            failure: None,
            ending: None,
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
        let mut acts = Vec::new();
        if self.doing == Doing::Over {
            return acts;
        }
        self.forgive_own_sleep(now);
        self.alone(now, &mut acts);
        self.take(now, event, &mut acts);
        let is_changed = before != (self.doing, self.fence, self.is_leased(now), self.leaving);
        if is_changed || now >= self.next_report {
            acts.push(Act::Send(self.report(now)));
        }
        if let (Doing::Over, Some(ending)) = (self.doing, &self.ending) {
            acts.push(Act::Exit(ending.clone()));
        }
        acts
    }

    /// Why the lease or the patience is over, if it is.
    fn decide_alone(&self, now: Duration) -> (Alone, Reason) {
        let span = now.saturating_sub(self.contact);
        let patience = match self.coordinator {
            None => self.policy.join_timeout,
            Some(_) if self.leaving => self.policy.lease,
            Some(_) => self.policy.give_up_after,
        };
        match self.doing.alive() {
            Some(round) if !self.is_leased(now) => (Alone::Kill(round), Reason::LeaseOver),
            None if span >= patience => (Alone::GiveUp, Reason::StoreLost { span }),
            _ => (Alone::Keep, Reason::Quiet),
        }
    }

    fn alone(&mut self, now: Duration, acts: &mut Vec<Act>) {
        match self.decide_alone(now) {
            (Alone::Keep, _) => {}
            (Alone::Kill(round), _) => self.stop(round, Grace::None, acts),
            (Alone::GiveUp, _) if self.leaving => self.end(Ending::Left, acts),
            (Alone::GiveUp, why) => self.end(Ending::Failure(why), acts),
        }
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
        if gap > 2 * self.policy.heartbeat && self.contact < longest {
            self.contact = (self.contact + gap).min(longest);
        }
    }

    fn take(&mut self, now: Duration, event: Event, acts: &mut Vec<Act>) {
        match event {
            Event::Tick => {}
            Event::Order(order) => self.obey(now, order, acts),
            Event::WorkersDone(round) if self.doing == Doing::Running(round) => {
                self.doing = Doing::Done(round);
                self.fence = self.fence.max(round);
            }
            Event::WorkerFailed(failure) if self.doing == Doing::Running(failure.round) => {
                self.stop(failure.round, Grace::Full, acts);
                self.failure = Some(failure);
            }
            Event::WorkersStopped(round) if self.doing.alive() == Some(round) => {
                self.fence = self.fence.max(round);
                self.doing = if self.ending.is_some() { Doing::Over } else { Doing::Idle };
            }
            Event::Leave => {
                self.leaving = true;
                if let Some(round) = self.doing.alive() {
                    self.stop(round, Grace::Full, acts);
                }
            }
            Event::WorkersDone(_) | Event::WorkerFailed(_) | Event::WorkersStopped(_) => {}
        }
    }

    fn obey(&mut self, now: Duration, order: Order, acts: &mut Vec<Act>) {
        let is_stranger = self.coordinator.is_some_and(|known| known != order.coordinator);
        if is_stranger || order.number <= self.last_order || self.ending.is_some() {
            return;
        }
        // An order that answers a report older than the lease grants nothing: it was under way for too long.
        let Some(sent) = self.sent.iter().find(|(number, _)| *number == order.answers).map(|(_, at)| *at)
        else {
            return;
        };
        if now >= sent + self.policy.lease {
            return;
        }
        self.coordinator = Some(order.coordinator);
        self.last_order = order.number;
        self.contact = self.contact.max(sent);
        match order.wish {
            Wish::Hold { fence, grace, .. } => self.hold(fence, grace, acts),
            Wish::Run(round) => self.run(round, acts),
            Wish::End(ending) => self.end(ending, acts),
        }
    }

    fn hold(&mut self, fence: u64, grace: Grace, acts: &mut Vec<Act>) {
        self.fence = self.fence.max(fence);
        self.failure.take_if(|failure| failure.round <= fence);
        match self.doing {
            Doing::Running(round) | Doing::Stopping(round) if round <= fence => self.stop(round, grace, acts),
            Doing::Done(round) if round <= fence => self.doing = Doing::Idle,
            _ => {}
        }
    }

    fn run(&mut self, round: Round, acts: &mut Vec<Act>) {
        if self.doing == Doing::Idle && round.number > self.fence && !self.leaving {
            self.doing = Doing::Running(round.number);
            self.stop_grace = Grace::Full;
            // Rounds between the last one and this one were formed without this agent.
            self.fence = round.number - 1;
            acts.push(Act::Start(round));
        }
    }

    fn end(&mut self, ending: Ending, acts: &mut Vec<Act>) {
        self.ending = Some(ending);
        match self.doing.alive() {
            Some(round) => self.stop(round, Grace::Full, acts),
            None => self.doing = Doing::Over,
        }
    }

    /// Stops the workers, or hurries a stop that is under way.
    fn stop(&mut self, round: u64, grace: Grace, acts: &mut Vec<Act>) {
        let is_hurry = (grace == Grace::None && self.stop_grace != Grace::None)
            || (grace == Grace::Short && self.stop_grace == Grace::Full);
        if self.doing == Doing::Running(round) || is_hurry {
            self.doing = Doing::Stopping(round);
            self.stop_grace = grace;
            acts.push(Act::Stop(round, grace));
        }
    }

    fn report(&mut self, now: Duration) -> Report {
        self.reports += 1;
        self.next_report = now + self.policy.heartbeat;
        let lease = self.policy.lease;
        self.sent.retain(|(_, at)| now < *at + lease);
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
