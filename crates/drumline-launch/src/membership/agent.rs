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
        if is_stranger || self.ending.is_some() {
            return;
        }
        // An order that answers a report older than the lease grants nothing: it was under way for too long.
        self.forget_old_reports(now);
        let answered = self.sent.iter().find(|(number, _)| *number == order.answers);
        let Some((_, sent)) = answered.copied() else { return };
        self.coordinator = Some(order.coordinator);
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
mod tests {
    use super::super::message::AgentId;
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn card() -> AgentCard {
        AgentCard { id: AgentId(1), host: "n1".into(), slots: 2 }
    }

    fn order(answers: u64, wish: Wish) -> Event {
        Event::Order(Order { coordinator: 9, answers, wish })
    }

    fn round(number: u64) -> Wish {
        Wish::Run(Round::deal(number, 0, vec![card()]))
    }

    /// An agent that runs round 1; its first report was sent at 0 and answered at 100 ms.
    fn running() -> Agent {
        let mut agent = Agent::new(card(), Policy::default(), at(0));
        agent.step(at(0), Event::Tick);
        let acts = agent.step(at(100), order(1, round(1)));
        assert!(matches!(acts[0], Act::Start(_)), "{acts:?}");
        agent
    }

    #[test]
    fn the_lease_counts_from_the_sending_and_its_end_kills() {
        let mut agent = running();
        assert_eq!(agent.lease_end(), Some(at(3000)));
        agent.step(at(2999), Event::Tick);
        assert_eq!(agent.doing(), Doing::Running(1));
        assert!(agent.step(at(3000), Event::Tick).contains(&Act::Stop(1, Grace::None)));
        agent.step(at(3100), Event::WorkersStopped(1));
        assert_eq!(agent.doing(), Doing::Idle);
    }

    #[test]
    fn an_agent_that_slept_kills_before_it_hears() {
        let mut agent = running();
        let acts = agent.step(at(60_000), order(2, round(1)));
        assert_eq!(acts[0], Act::Stop(1, Grace::None));
        assert!(!acts.iter().any(|act| matches!(act, Act::Exit(_))), "it asks before it gives up: {acts:?}");
    }

    #[test]
    fn what_is_old_is_refused() {
        let mut agent = running();
        agent.step(at(200), order(2, Wish::Hold { fence: 1, grace: Grace::Short, why: Reason::Quiet }));
        agent.step(at(300), Event::WorkersStopped(1));
        let refused = |agent: &mut Agent, event| {
            agent.step(at(310), event);
            assert_eq!(agent.doing(), Doing::Idle);
        };
        refused(&mut agent, order(2, round(1)));
        refused(&mut agent, order(99, round(2)));
        let other = Order { coordinator: 8, answers: 2, wish: round(2) };
        refused(&mut agent, Event::Order(other));
        agent.step(at(320), order(2, round(2)));
        assert_eq!(agent.doing(), Doing::Running(2), "the control");
    }

    #[test]
    fn an_order_that_was_under_way_for_longer_than_the_lease_is_refused() {
        let mut agent = Agent::new(card(), Policy::default(), at(0));
        agent.step(at(0), Event::Tick);
        agent.step(at(3000), order(1, round(1)));
        assert_eq!(agent.doing(), Doing::Idle);
        agent.step(at(3100), order(2, round(1)));
        assert_eq!(agent.doing(), Doing::Running(1), "the control");
    }

    #[test]
    fn the_death_of_the_stores_host_ends_the_agent_within_ten_seconds() {
        let mut agent = running();
        let mut acts = Vec::new();
        for now in (200..10_000).step_by(100) {
            acts.extend(agent.step(at(now), Event::Tick));
            if now == 3500 {
                acts.extend(agent.step(at(now), Event::WorkersStopped(1)));
            }
        }
        assert!(acts.contains(&Act::Stop(1, Grace::None)));
        assert_eq!(acts.last(), Some(&Act::Exit(Ending::Failure(Reason::StoreLost { span: at(8000) }))));
    }

    #[test]
    fn leaving_stops_the_workers_first() {
        let mut agent = running();
        assert!(agent.step(at(200), Event::Leave).contains(&Act::Stop(1, Grace::Full)));
        agent.step(at(400), Event::WorkersStopped(1));
        let acts = agent.step(at(500), order(3, Wish::End(Ending::Left)));
        assert_eq!(acts.last(), Some(&Act::Exit(Ending::Left)));
    }
}
