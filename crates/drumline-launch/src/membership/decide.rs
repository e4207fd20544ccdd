//! The coordinator's decisions, as a pure function: from what it knows to what to do, and why.
//!
//! `decide` changes nothing. [`super::Coordinator`] carries out the decision, and calls it again until it says to wait.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::message::{AgentCard, AgentId, Doing, Report, Round, WorkerFailure};
use super::policy::Policy;
use super::reason::{Cause, Ending, Loss, Reason};

/// What the coordinator knows.
#[derive(Clone, Debug)]
pub struct State {
    /// The phase of the job.
    pub phase: Phase,
    /// The agents that count as present.
    pub agents: BTreeMap<AgentId, KnownAgent>,
    /// The number of the latest round formed.
    pub last_round: u64,
    /// How many restarts were used.
    pub restarts: usize,
    /// Why the last round ended.
    pub after: Option<Cause>,
    /// How members of the last round were lost.
    pub lost: BTreeMap<AgentId, Loss>,
    /// The last failure, and how many quick failures of the same rank there were in a row.
    pub quick: Option<(WorkerFailure, usize)>,
}

/// An agent, as its latest report describes it.
#[derive(Clone, Debug)]
pub struct KnownAgent {
    /// Its latest report.
    pub report: Report,
    /// When that report arrived, on the coordinator's clock.
    pub last_heard: Duration,
    /// Its position in the order in which agents joined.
    pub place: u64,
    /// When it joined.
    pub came: Duration,
    /// When the end of its process was proved. A later report disproves it.
    pub died: Option<Duration>,
}

/// The phase of the job.
#[derive(Clone, Debug)]
pub enum Phase {
    /// The coordinator waits for agents.
    Gathering {
        /// Since when.
        since: Duration,
        /// Since when there are at least the minimum number of nodes.
        enough: Option<Duration>,
        /// How long to wait for more nodes, once there are enough.
        last_call: Duration,
        /// With this many nodes there is no last call.
        complete: usize,
        /// The round does not start before this time.
        not_before: Duration,
    },
    /// A round runs.
    Running {
        /// The round.
        round: Round,
        /// The members whose workers all succeeded; the loss of such a member does no harm.
        done: BTreeSet<AgentId>,
    },
    /// A round is being stopped.
    Closing {
        /// The round.
        round: Round,
        /// Since when.
        since: Duration,
        /// Why.
        cause: Cause,
    },
    /// The job is over.
    Over(Ending),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Do nothing until a report arrives or time has passed.
    Wait,
    /// Remove this agent: it no longer counts as present.
    Evict(AgentId),
    /// Form a round from these agents, in node order.
    Form(Vec<AgentCard>),
    /// Stop the running round.
    Close(Cause),
    /// All members have stopped: gather again, because of this cause.
    Regather(Cause),
    /// The job is over.
    End(Ending),
    /// All agents know that the job is over: the coordinator may exit.
    Exit,
}

impl State {
    /// The state at the start of a job.
    pub fn new(now: Duration, policy: &Policy) -> Self {
        let phase = Phase::Gathering {
            since: now,
            enough: None,
            last_call: policy.last_call,
            complete: policy.max_nodes,
            not_before: now,
        };
        State {
            phase,
            agents: BTreeMap::new(),
            last_round: 0,
            restarts: 0,
            after: None,
            lost: BTreeMap::new(),
            quick: None,
        }
    }

    /// The agents that could be in the next round, in node order. An agent agrees by being idle and holding a lease.
    pub fn candidates(&self, now: Duration, policy: &Policy) -> Vec<AgentCard> {
        let is_ready = |known: &&KnownAgent| {
            let is_fresh =
                known.died.is_none() && now.saturating_sub(known.last_heard) < policy.fresh_within();
            let agrees = known.disagreement(policy).is_none();
            agrees && is_fresh && known.is_ready(self.last_round) && self.rival(known).is_none()
        };
        let mut ready: Vec<&KnownAgent> = self.agents.values().filter(is_ready).collect();
        ready.sort_by_key(|known| (known.report.agent.node_rank, known.place));
        ready.into_iter().map(|known| known.report.agent.clone()).collect()
    }

    /// The agent that joined earlier with the same assigned node rank.
    pub fn rival(&self, known: &KnownAgent) -> Option<&KnownAgent> {
        let rank = known.report.agent.node_rank?;
        let is_rival =
            |other: &&KnownAgent| other.report.agent.node_rank == Some(rank) && other.place < known.place;
        self.agents.values().find(is_rival)
    }

    /// How many agents there are that are not leaving.
    pub fn num_left(&self) -> usize {
        self.agents.values().filter(|known| !known.report.leaving).count()
    }

    /// Whether gathering again for this cause uses a restart. In an elastic job, a change of nodes uses none as long as
    /// enough nodes are left.
    pub fn uses_restart(&self, cause: &Cause, policy: &Policy) -> bool {
        match cause {
            Cause::Failed(_) => true,
            Cause::Came(_) => false,
            Cause::Lost { .. } | Cause::FellOut(_) | Cause::Left(_) => {
                !policy.is_elastic() || self.num_left() < policy.min_nodes
            }
        }
    }

    /// The number of quick failures in a row, once `failure` is added.
    pub fn streak(&self, failure: &WorkerFailure, policy: &Policy) -> usize {
        if failure.ran_for >= policy.crash_loop.within {
            return 0;
        }
        match &self.quick {
            Some((last, times)) if last.rank == failure.rank => times + 1,
            _ => 1,
        }
    }
}

impl KnownAgent {
    /// The setting in which this agent differs from the coordinator. An agent without a setting accepts any.
    pub fn disagreement(&self, policy: &Policy) -> Option<Reason> {
        let AgentCard { nodes: given, host_timeout, .. } = self.report.agent;
        let agreed = (policy.min_nodes, policy.max_nodes);
        if given != (0, 0) && given != agreed {
            return Some(Reason::OtherNodes { given, agreed });
        }
        let agreed = policy.host_timeout;
        let differs = !host_timeout.is_zero() && host_timeout != agreed;
        differs.then_some(Reason::OtherHostTimeout { given: host_timeout, agreed })
    }

    fn is_ready(&self, last_round: u64) -> bool {
        let Report { doing, leased, leaving, fence, .. } = self.report;
        // An agent whose fence is ahead would refuse the next round forever.
        doing == Doing::Idle && leased && !leaving && fence <= last_round
    }

    fn has_stopped(&self, round: u64) -> bool {
        self.report.doing.alive().is_none() && self.report.fence >= round
    }
}

/// What the coordinator should do now, and why.
pub fn decide(now: Duration, state: &State, policy: &Policy) -> (Decision, Reason) {
    if let Some(eviction) = eviction(now, state, policy) {
        return eviction;
    }
    match &state.phase {
        Phase::Gathering { .. } => gathering(now, state, policy),
        Phase::Running { .. } => running(now, state, policy),
        Phase::Closing { round, since, cause } => match still_stopping(state, round) {
            None => closed(state, policy, round, cause),
            Some(host) if now >= *since + policy.stop_within => {
                fail(Reason::WouldNotStop { host, span: policy.stop_within })
            }
            Some(_) => (Decision::Wait, Reason::Closing(cause.clone())),
        },
        Phase::Over(_) if state.agents.is_empty() => (Decision::Exit, Reason::AllInformed),
        Phase::Over(_) => (Decision::Wait, Reason::Quiet),
    }
}

fn fail(reason: Reason) -> (Decision, Reason) {
    (Decision::End(Ending::Failure(reason.clone())), reason)
}

/// The next agent to evict. Its workers have ended, at the latest when their lease ended, or with their agent.
fn eviction(now: Duration, state: &State, policy: &Policy) -> Option<(Decision, Reason)> {
    state.agents.iter().find_map(|(id, known)| {
        let span = now.saturating_sub(known.last_heard);
        let host = known.report.agent.host.clone();
        if known.died.is_some_and(|at| now >= at + policy.kill_within) {
            return Some((Decision::Evict(*id), Reason::Died { host }));
        }
        (span >= policy.evict_after).then_some((Decision::Evict(*id), Reason::Silent { host, span }))
    })
}

fn gathering(now: Duration, state: &State, policy: &Policy) -> (Decision, Reason) {
    let Phase::Gathering { since, enough, last_call, complete, not_before } = state.phase else {
        return (Decision::Wait, Reason::Quiet);
    };
    let mut ready = state.candidates(now, policy);
    let came = ready.len();
    if came < policy.min_nodes {
        let came = ready.into_iter().map(|card| card.host).collect();
        let reason = Reason::TooFew { came, min: policy.min_nodes };
        return if now >= since + policy.join_timeout { fail(reason) } else { (Decision::Wait, reason) };
    }
    if now < not_before {
        return (Decision::Wait, Reason::BackOff(not_before - now));
    }
    if came >= complete || enough.is_some_and(|enough| now >= enough + last_call) {
        ready.truncate(policy.max_nodes);
        let reason = Reason::Complete { nodes: ready.len() };
        return (Decision::Form(ready), reason);
    }
    (Decision::Wait, Reason::LastCall { came, max: policy.max_nodes })
}

fn running(now: Duration, state: &State, policy: &Policy) -> (Decision, Reason) {
    let Phase::Running { round, done } = &state.phase else { return (Decision::Wait, Reason::Quiet) };
    let unfinished: Vec<_> = round.members.iter().filter(|member| !done.contains(&member.agent.id)).collect();
    if unfinished.is_empty() {
        return (Decision::End(Ending::Success), Reason::AllDone);
    }
    // A failure takes precedence: the workers of the failing agent are also stopping, or gone.
    let known = |id: &AgentId| state.agents.get(id);
    let failure = unfinished.iter().find_map(|member| failure_of(known(&member.agent.id)?, round.number));
    let departure = || unfinished.iter().find_map(|member| departure(state, &member.agent, round));
    // Once the first members are done, the job is about to end, and a newcomer is not worth a restart.
    let newcomer = || newcomer(now, state, policy, round).filter(|_| done.is_empty());
    let cause = failure.map(Cause::Failed).or_else(departure).or_else(newcomer);
    match cause {
        Some(cause) => (Decision::Close(cause.clone()), Reason::Closing(cause)),
        None => (Decision::Wait, Reason::Runs { round: round.number }),
    }
}

fn failure_of(known: &KnownAgent, round: u64) -> Option<WorkerFailure> {
    known.report.failure.clone().filter(|failure| failure.round == round)
}

/// Why a member no longer takes part, if so.
fn departure(state: &State, agent: &AgentCard, round: &Round) -> Option<Cause> {
    let host = agent.host.clone();
    match state.agents.get(&agent.id) {
        None => Some(lost(state, agent)),
        Some(known) if known.report.leaving => Some(Cause::Left(host)),
        Some(known) if known.has_stopped(round.number) => Some(Cause::FellOut(host)),
        Some(_) => None,
    }
}

fn lost(state: &State, agent: &AgentCard) -> Cause {
    let how = state.lost.get(&agent.id).cloned().unwrap_or(Loss::Ended);
    Cause::Lost { host: agent.host.clone(), how }
}

/// A new agent for which it is worth closing the running round.
fn newcomer(now: Duration, state: &State, policy: &Policy, round: &Round) -> Option<Cause> {
    if round.members.len() >= policy.max_nodes {
        return None;
    }
    let newcomer =
        state.candidates(now, policy).into_iter().find(|card| round.node_rank(card.id).is_none())?;
    Some(Cause::Came(newcomer.host))
}

/// The host of a member that has not stopped yet, if any.
fn still_stopping(state: &State, round: &Round) -> Option<String> {
    let is_running =
        |id| state.agents.get(id).is_some_and(|known: &KnownAgent| !known.has_stopped(round.number));
    round.members.iter().find(|member| is_running(&member.agent.id)).map(|member| member.agent.host.clone())
}

/// Decides what follows a round that has stopped. A missing member explains the failures of the others.
fn closed(state: &State, policy: &Policy, round: &Round, cause: &Cause) -> (Decision, Reason) {
    let Cause::Failed(failure) = cause else { return regather_or_fail(state, policy, cause.clone()) };
    if let Some(missing) = round.members.iter().find(|member| !state.agents.contains_key(&member.agent.id)) {
        return regather_or_fail(state, policy, lost(state, &missing.agent));
    }
    let failure = failure.clone();
    let max_restarts = policy.max_restarts;
    if state.restarts >= max_restarts {
        return fail(Reason::OutOfRestarts { failure, max_restarts });
    }
    let times = state.streak(&failure, policy);
    if times >= policy.crash_loop.times {
        return fail(Reason::CrashLoop { failure, times });
    }
    (Decision::Regather(cause.clone()), Reason::Stopped(cause.clone()))
}

/// Gathers again after a change of members, unless that is a restart and none is left.
fn regather_or_fail(state: &State, policy: &Policy, cause: Cause) -> (Decision, Reason) {
    let left = state.num_left();
    let min = policy.min_nodes;
    let max_restarts = policy.max_restarts;
    if state.uses_restart(&cause, policy) && state.restarts >= max_restarts {
        let is_too_few = left < min;
        return fail(if is_too_few {
            Reason::TooFewLeft { cause, left, min }
        } else {
            Reason::NoRestartLeft { cause, max_restarts }
        });
    }
    (Decision::Regather(cause.clone()), Reason::Stopped(cause))
}
