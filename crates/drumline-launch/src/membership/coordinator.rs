//! The coordinator: hears reports, carries out what `decide` says, and has one order ready for each agent.
//!
//! ```text
//!   report ─▶ hear ─▶ State ─▶ decide ─▶ State ─▶ order of each agent
//!             tick ──────────────┘ (again until it says: wait)
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use super::agent::STOOD_STILL;
use super::decide::{Decision, Known, Phase, State, decide};
use super::message::{AgentCard, AgentId, Doing, Order, Report, Round, Wish};
use super::policy::Policy;
use super::reason::{Cause, Ending, Loss, Reason};

/// The view of the store's host.
#[derive(Debug)]
pub struct Coordinator {
    id: u128,
    policy: Policy,
    state: State,
    why: Reason,
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
        Coordinator { id, policy, state, why, places, last_step: now, gone, may_exit: false }
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
            self.lose(id, Loss::Ended);
        } else {
            self.note(now, report);
        }
        self.settle(now)
    }

    /// Takes in the proof that the process of `agent` has ended. Returns what was decided.
    pub fn hear_of_death(&mut self, now: Duration, agent: AgentId) -> Vec<(Decision, Reason)> {
        if let Some(known) = self.state.agents.get_mut(&agent) {
            known.died.get_or_insert(now);
        }
        self.tick(now)
    }

    /// Lets time pass. Returns what was decided.
    pub fn tick(&mut self, now: Duration) -> Vec<(Decision, Reason)> {
        self.forgive_own_sleep(now);
        self.settle(now)
    }

    /// Ends the job because the agent on the store's own host was asked to leave by this signal.
    pub fn host_leaves(&mut self, signal: i32) {
        if !matches!(self.state.phase, Phase::Over(_)) {
            self.state.phase = Phase::Over(Ending::Failure(Reason::StoreHostLeft { signal }));
        }
    }

    /// What is wanted of `agent` now; `None` for one that is not known.
    pub fn order(&self, agent: AgentId) -> Option<Order> {
        let known = self.state.agents.get(&agent)?;
        let (answers, wish) = (known.report.number, self.wish(known));
        Some(Order { coordinator: self.id, answers, wish })
    }

    /// The agents to which orders go.
    pub fn agents(&self) -> Vec<AgentId> {
        self.state.agents.keys().copied().collect()
    }

    /// A coordinator that stood still itself (SIGSTOP) has heard nobody; that is not their silence.
    fn forgive_own_sleep(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        if gap > STOOD_STILL {
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
        let (place, came) = self.state.agents.get(&id).map_or_else(
            || {
                self.places += 1;
                (self.places, now)
            },
            |known| (known.place, known.came),
        );
        self.state.agents.insert(id, Known { report, heard: now, place, came, died: None });
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
                    self.carry_out(now, &decision, &why);
                    decided.push((decision, why));
                }
            }
        }
    }

    /// Notes since when there are enough agents.
    fn count(&mut self, now: Duration) {
        let is_enough = self.state.candidates(now, &self.policy).len() >= self.policy.min_nodes;
        if let Phase::Gathering { enough, .. } = &mut self.state.phase {
            *enough = is_enough.then(|| enough.unwrap_or(now));
        }
    }

    fn carry_out(&mut self, now: Duration, decision: &Decision, why: &Reason) {
        match decision {
            Decision::Wait | Decision::Exit => {}
            Decision::Evict(id) => match why {
                Reason::Silent { span, .. } => {
                    self.state.lost.insert(*id, Loss::Silent(*span));
                    self.state.agents.remove(id);
                }
                _ => self.lose(*id, Loss::Died),
            },
            Decision::Form(agents) => self.form(agents.clone()),
            Decision::Close(cause) => self.close(now, cause.clone()),
            Decision::Regather(cause) => self.regather(now, cause),
            Decision::End(ending) => self.state.phase = Phase::Over(ending.clone()),
        }
    }

    /// An agent that never returns; what is still under way from it is dropped.
    fn lose(&mut self, id: AgentId, how: Loss) {
        self.gone.insert(id);
        self.state.lost.insert(id, how);
        self.state.agents.remove(&id);
    }

    fn form(&mut self, agents: Vec<AgentCard>) {
        self.state.last_round += 1;
        self.state.lost.clear();
        let after = self.state.after.take();
        let round = Round { after, ..Round::deal(self.state.last_round, self.state.restarts, agents) };
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
        let uses_restart = self.state.uses_restart(cause, &self.policy);
        if let Cause::Failed(failure) = cause {
            // The members are all there: nobody else is worth waiting for.
            complete = round.members.len();
            let streak = self.state.streak(failure, &self.policy);
            pause = self.policy.pause(streak);
            self.state.quick = Some((failure.clone(), streak));
        }
        self.state.restarts += usize::from(uses_restart);
        self.state.after = Some(cause.clone());
        let (last_call, not_before) = (self.policy.settle, now + pause);
        self.state.phase = Phase::Gathering { since: now, enough: None, last_call, complete, not_before };
    }

    fn wish(&self, known: &Known) -> Wish {
        let report = &known.report;
        if let Some(differs) = known.disagreement(&self.policy) {
            return Wish::End(Ending::Failure(differs));
        }
        match &self.state.phase {
            Phase::Over(_) if self.state.rival(known).is_some() => self.refuse(known),
            Phase::Over(ending) => Wish::End(ending.clone()),
            _ if report.leaving && report.doing.alive().is_none() => Wish::End(Ending::Left),
            _ if self.is_double(known) => self.refuse(known),
            Phase::Running { round, .. } if report.doing.round() == Some(round.number) => Wish::Keep,
            Phase::Running { round, .. } if round.node_rank(report.agent.id).is_some() => {
                Wish::Run(round.clone())
            }
            Phase::Running { round, .. } if round.members.len() >= self.policy.max_nodes => {
                self.hold(Reason::Spare)
            }
            _ => self.hold(self.why.clone()),
        }
    }

    /// Whether another node has this one's place and is alive: it was heard well after this one came.
    fn is_double(&self, known: &Known) -> bool {
        let is_heard = |rival: &Known| rival.heard > known.came + self.policy.fresh_within();
        self.state.rival(known).is_some_and(is_heard)
    }

    fn refuse(&self, known: &Known) -> Wish {
        let host = self.state.rival(known).map_or_else(String::new, |rival| rival.report.agent.host.clone());
        let node_rank = known.report.agent.node_rank.unwrap_or(0);
        Wish::End(Ending::Failure(Reason::NodeRankTaken { node_rank, host }))
    }

    fn hold(&self, why: Reason) -> Wish {
        Wish::Hold { fence: self.state.last_round, why }
    }
}

#[cfg(test)]
mod tests;
