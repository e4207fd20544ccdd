//! The coordinator: receives reports, carries out what `decide` says, and has one order ready for each agent.
//!
//! ```text
//!   report ─▶ receive_report ─▶ State ─▶ decide ─▶ State ─▶ order of each agent
//!                       tick ──────────────┘ (repeated until it says: wait)
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use super::agent::PAUSED;
use super::decide::{Decision, KnownAgent, Phase, State, decide};
use super::message::{AgentCard, AgentId, Doing, Instruction, Order, Report, Round};
use super::policy::Policy;
use super::reason::{Cause, Ending, Loss, Reason};

/// The state machine of the coordinator, which runs on the store's host.
#[derive(Debug)]
pub struct Coordinator {
    id: u128,
    policy: Policy,
    state: State,
    why: Reason,
    /// How many agents have joined so far.
    num_joined: u64,
    last_step: Duration,
    /// Agents that have ended; their late reports are dropped.
    gone: BTreeSet<AgentId>,
    may_exit: bool,
}

impl Coordinator {
    /// A coordinator with a random `id`; `now` is the time on its own monotonic clock, here and below.
    pub fn new(id: u128, policy: Policy, now: Duration) -> Self {
        let state = State::new(now, &policy);
        let why = Reason::TooFew { came: Vec::new(), min: policy.min_nodes };
        Coordinator {
            id,
            policy,
            state,
            why,
            num_joined: 0,
            last_step: now,
            gone: BTreeSet::new(),
            may_exit: false,
        }
    }

    /// What it knows.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether the job is over and all agents know it, or cannot be reached.
    pub fn may_exit(&self) -> bool {
        self.may_exit
    }

    /// Processes a report, and returns what was decided. The caller should send the agent its [`order`](Self::order) at
    /// once. If something was decided, it should send all agents their orders.
    pub fn receive_report(&mut self, now: Duration, report: Report) -> Vec<(Decision, Reason)> {
        self.discount_own_pause(now);
        let id = report.agent.id;
        let is_late = self.state.agents.get(&id).is_some_and(|known| known.report.number >= report.number);
        if self.gone.contains(&id) || is_late {
            return Vec::new();
        }
        if report.doing == Doing::Over {
            self.lose(id, Loss::Ended);
        } else {
            self.record(now, report);
        }
        self.decide_until_wait(now)
    }

    /// Processes the proof that the process of `agent` has ended, and returns what was decided.
    pub fn receive_death_proof(&mut self, now: Duration, agent: AgentId) -> Vec<(Decision, Reason)> {
        if let Some(known) = self.state.agents.get_mut(&agent) {
            known.died.get_or_insert(now);
        }
        self.tick(now)
    }

    /// Checks the time, and returns what was decided.
    pub fn tick(&mut self, now: Duration) -> Vec<(Decision, Reason)> {
        self.discount_own_pause(now);
        self.decide_until_wait(now)
    }

    /// Ends the job because this signal asked the agent on the store's own host to leave.
    pub fn host_leaves(&mut self, signal: i32) {
        if !matches!(self.state.phase, Phase::Over(_)) {
            self.state.phase = Phase::Over(Ending::Failure(Reason::StoreHostLeft { signal }));
        }
    }

    /// The current order for `agent`; `None` for an unknown agent.
    pub fn order(&self, agent: AgentId) -> Option<Order> {
        let known = self.state.agents.get(&agent)?;
        Some(Order {
            coordinator: self.id,
            answers: known.report.number,
            instruction: self.instruction(known),
        })
    }

    /// The agents that receive orders.
    pub fn agents(&self) -> Vec<AgentId> {
        self.state.agents.keys().copied().collect()
    }

    /// If the coordinator itself was paused (SIGSTOP), it received nothing: that does not count as the agents' silence.
    fn discount_own_pause(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.last_step);
        self.last_step = now;
        if gap > PAUSED {
            self.state.agents.values_mut().for_each(|known| known.last_heard += gap);
        }
    }

    fn record(&mut self, now: Duration, report: Report) {
        let id = report.agent.id;
        if let Phase::Running { round, done } = &mut self.state.phase
            && report.doing == Doing::Done(round.number)
        {
            done.insert(id);
        }
        let (place, came) = self.state.agents.get(&id).map_or_else(
            || {
                self.num_joined += 1;
                (self.num_joined, now)
            },
            |known| (known.place, known.came),
        );
        self.state.agents.insert(id, KnownAgent { report, last_heard: now, place, came, died: None });
    }

    /// Decides and carries out, until nothing is left to do.
    fn decide_until_wait(&mut self, now: Duration) -> Vec<(Decision, Reason)> {
        let mut decided = Vec::new();
        loop {
            self.update_enough(now);
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

    /// Records since when there are enough agents.
    fn update_enough(&mut self, now: Duration) {
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

    /// Removes an agent that never returns. Its late reports are dropped.
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
        let mut complete = self.policy.max_nodes;
        let mut pause = Duration::ZERO;
        let uses_restart = self.state.uses_restart(cause, &self.policy);
        if let Cause::Failed(failure) = cause {
            // All members are still present, so there is no need to wait for others.
            complete = round.members.len();
            let streak = self.state.streak(failure, &self.policy);
            pause = self.policy.pause(streak);
            self.state.quick = Some((failure.clone(), streak));
        }
        self.state.restarts += usize::from(uses_restart);
        self.state.after = Some(cause.clone());
        self.state.phase = Phase::Gathering {
            since: now,
            enough: None,
            last_call: self.policy.settle,
            complete,
            not_before: now + pause,
        };
    }

    fn instruction(&self, known: &KnownAgent) -> Instruction {
        let report = &known.report;
        if let Some(differs) = known.disagreement(&self.policy) {
            return Instruction::End(Ending::Failure(differs));
        }
        match &self.state.phase {
            Phase::Over(_) if self.state.rival(known).is_some() => self.refuse(known),
            Phase::Over(ending) => Instruction::End(ending.clone()),
            _ if report.leaving && report.doing.alive().is_none() => Instruction::End(Ending::Left),
            _ if self.is_duplicate(known) => self.refuse(known),
            Phase::Running { round, .. } if report.doing.round() == Some(round.number) => Instruction::Keep,
            Phase::Running { round, .. } if round.node_rank(report.agent.id).is_some() => {
                Instruction::Run(round.clone())
            }
            Phase::Running { round, .. } if round.members.len() >= self.policy.max_nodes => {
                self.hold(Reason::Spare)
            }
            _ => self.hold(self.why.clone()),
        }
    }

    /// Whether another live node has this one's node rank: it reported well after this one joined.
    fn is_duplicate(&self, known: &KnownAgent) -> bool {
        let is_alive = |rival: &KnownAgent| rival.last_heard > known.came + self.policy.fresh_within();
        self.state.rival(known).is_some_and(is_alive)
    }

    fn refuse(&self, known: &KnownAgent) -> Instruction {
        let host = self.state.rival(known).map_or_else(String::new, |rival| rival.report.agent.host.clone());
        let node_rank = known.report.agent.node_rank.unwrap_or(0);
        Instruction::End(Ending::Failure(Reason::NodeRankTaken { node_rank, host }))
    }

    fn hold(&self, why: Reason) -> Instruction {
        Instruction::Hold { fence: self.state.last_round, why }
    }
}

#[cfg(test)]
mod tests;
