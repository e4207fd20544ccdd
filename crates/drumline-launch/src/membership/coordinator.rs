//! The coordinator: hears reports, carries out what `decide` says, and has one order ready for each agent.
//!
//! ```text
//!   report ─▶ hear ─▶ State ─▶ decide ─▶ State ─▶ order of each agent
//!             tick ──────────────┘ (again until it says: wait)
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use super::agent::Grace;
use super::decide::{Decision, Known, Phase, State, decide};
use super::message::{AgentCard, AgentId, Doing, Order, Report, Round, Wish};
use super::policy::Policy;
use super::reason::{Cause, Ending, Reason};

/// The view of the store's host.
#[derive(Debug)]
pub struct Coordinator {
    id: u128,
    policy: Policy,
    state: State,
    why: Reason,
    orders: u64,
    places: u64,
    last_step: Duration,
    /// Agents that said that they go; what is still under way from them is dropped.
    gone: BTreeSet<AgentId>,
    may_exit: bool,
}

impl Coordinator {
    /// A coordinator with a random `id`; `now` is the time on its own monotonic clock, here and below.
    pub fn new(id: u128, policy: Policy, now: Duration) -> Self {
        let state = State::new(now, &policy);
        let why = Reason::TooFew { came: Vec::new(), min: policy.min_nodes };
        let (gone, places) = (BTreeSet::new(), 0);
        Coordinator { id, policy, state, why, orders: 0, places, last_step: now, gone, may_exit: false }
    }

    /// What it knows.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether the job is over and all agents know it, or cannot be reached.
    pub fn may_exit(&self) -> bool {
        self.may_exit
    }

    /// Takes in a report. Returns what was decided. The agent should be sent its [`order`](Self::order) at once; when
    /// something was decided, so should all others.
    pub fn hear(&mut self, now: Duration, report: Report) -> Vec<(Decision, Reason)> {
        self.forgive_own_sleep(now);
        let id = report.agent.id;
        let is_late = self.state.agents.get(&id).is_some_and(|known| known.report.number >= report.number);
        if self.gone.contains(&id) || is_late {
            return Vec::new();
        }
        if report.doing == Doing::Over {
            self.gone.insert(id);
            self.state.agents.remove(&id);
        } else {
            self.note(now, report);
        }
        self.settle(now)
    }

    /// Lets time pass. Returns what was decided.
    pub fn tick(&mut self, now: Duration) -> Vec<(Decision, Reason)> {
        self.forgive_own_sleep(now);
        self.settle(now)
    }

    /// Ends the job because the agent on the store's own host was asked to leave.
    pub fn host_leaves(&mut self) {
        if !matches!(self.state.phase, Phase::Over(_)) {
            self.state.phase = Phase::Over(Ending::Failure(Reason::StoreHostLeft));
        }
    }

    /// What is wanted of `agent` now; `None` for one that is not known.
    pub fn order(&mut self, agent: AgentId) -> Option<Order> {
        let known = self.state.agents.get(&agent)?;
        let (answers, wish) = (known.report.number, self.wish(known));
        self.orders += 1;
        Some(Order { coordinator: self.id, number: self.orders, answers, wish })
    }

    /// The agents to which orders go.
    pub fn agents(&self) -> Vec<AgentId> {
        self.state.agents.keys().copied().collect()
    }

    /// A coordinator that stood still itself (SIGSTOP) has heard nobody; that is not their silence.
    fn forgive_own_sleep(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        if gap > 2 * self.policy.heartbeat {
            self.state.agents.values_mut().for_each(|known| known.heard += gap);
        }
    }

    fn note(&mut self, now: Duration, report: Report) {
        let id = report.agent.id;
        if let Phase::Running { round, done } = &mut self.state.phase
            && report.doing == Doing::Done(round.number)
        {
            done.insert(id);
        }
        let place = self.state.agents.get(&id).map(|known| known.place).unwrap_or_else(|| {
            self.places += 1;
            self.places
        });
        self.state.agents.insert(id, Known { report, heard: now, place });
    }

    fn settle(&mut self, now: Duration) -> Vec<(Decision, Reason)> {
        let mut decided = Vec::new();
        loop {
            self.count(now);
            let (decision, why) = decide(now, &self.state, &self.policy);
            self.why = why.clone();
            match decision {
                Decision::Wait => return decided,
                Decision::Exit => {
                    self.may_exit = true;
                    return decided;
                }
                decision => {
                    self.carry_out(now, &decision);
                    decided.push((decision, why));
                }
            }
        }
    }

    /// Notes since when there are enough agents.
    fn count(&mut self, now: Duration) {
        let is_enough = self.state.candidates().len() >= self.policy.min_nodes;
        if let Phase::Gathering { enough, .. } = &mut self.state.phase {
            *enough = is_enough.then(|| enough.unwrap_or(now));
        }
    }

    fn carry_out(&mut self, now: Duration, decision: &Decision) {
        match decision {
            Decision::Wait | Decision::Exit => {}
            Decision::Evict(id) => {
                self.state.agents.remove(id);
            }
            Decision::Form(agents) => self.form(agents.clone()),
            Decision::Close(cause) => self.close(now, cause.clone()),
            Decision::Regather(cause) => self.regather(now, cause),
            Decision::End(ending) => self.state.phase = Phase::Over(ending.clone()),
        }
    }

    fn form(&mut self, agents: Vec<AgentCard>) {
        self.state.last_round += 1;
        let round = Round::deal(self.state.last_round, self.state.restarts, agents);
        self.state.phase = Phase::Running { round, done: BTreeSet::new() };
    }

    fn close(&mut self, now: Duration, cause: Cause) {
        if let Phase::Running { round, .. } = &self.state.phase {
            self.state.phase = Phase::Closing { round: round.clone(), since: now, cause };
        }
    }

    fn regather(&mut self, now: Duration, cause: &Cause) {
        let Phase::Closing { round, .. } = &self.state.phase else { return };
        let (mut complete, mut pause) = (self.policy.max_nodes, Duration::ZERO);
        if let Cause::Failed(failure) = cause {
            // The members are all there: nobody else is worth waiting for.
            complete = round.members.len();
            let streak = self.state.streak(failure, &self.policy);
            pause = self.policy.pause(streak);
            self.state.restarts += 1;
            self.state.quick = Some((failure.clone(), streak));
        }
        let (last_call, not_before) = (self.policy.settle, now + pause);
        self.state.phase = Phase::Gathering { since: now, enough: None, last_call, complete, not_before };
    }

    fn wish(&self, known: &Known) -> Wish {
        let report = &known.report;
        match &self.state.phase {
            Phase::Over(ending) => Wish::End(ending.clone()),
            _ if report.leaving && report.doing.alive().is_none() => Wish::End(Ending::Left),
            Phase::Running { round, .. } if round.node_rank(report.agent.id).is_some() => {
                Wish::Run(round.clone())
            }
            Phase::Running { round, .. } if round.members.len() >= self.policy.max_nodes => {
                self.hold(Reason::Spare)
            }
            _ => self.hold(self.why.clone()),
        }
    }

    fn hold(&self, why: Reason) -> Wish {
        // After a loss the job stands still: workers whose peers are gone get little time.
        let is_loss = matches!(
            &self.state.phase,
            Phase::Closing { cause: Cause::Lost(_) | Cause::FellOut(_) | Cause::Failed(_), .. }
        );
        let grace = if is_loss { Grace::Short } else { Grace::Full };
        Wish::Hold { fence: self.state.last_round, grace, why }
    }
}
