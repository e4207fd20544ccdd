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
        let (place, came) = self.state.agents.get(&id).map_or_else(
            || {
                self.places += 1;
                (self.places, now)
            },
            |known| (known.place, known.came),
        );
        self.state.agents.insert(id, Known { report, heard: now, place, came });
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
        let is_enough = self.state.candidates(&self.policy).len() >= self.policy.min_nodes;
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
            _ if self.is_misled(known) => Wish::End(Ending::Failure(Reason::OtherNodes {
                told: report.agent.nodes,
                agreed: (self.policy.min_nodes, self.policy.max_nodes),
            })),
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

    /// Whether it was told another number of nodes; one that was told none takes any.
    fn is_misled(&self, known: &Known) -> bool {
        let told = known.report.agent.nodes;
        told != (0, 0) && told != (self.policy.min_nodes, self.policy.max_nodes)
    }

    /// Whether another node has this one's place, and has had the time to be found dead.
    fn is_double(&self, known: &Known) -> bool {
        let waited = known.heard.saturating_sub(known.came);
        waited > self.policy.evict_after && self.state.rival(known).is_some()
    }

    fn refuse(&self, known: &Known) -> Wish {
        let host = self.state.rival(known).map_or_else(String::new, |rival| rival.report.agent.host.clone());
        let node_rank = known.report.agent.node_rank.unwrap_or(0);
        Wish::End(Ending::Failure(Reason::NodeRankTaken { node_rank, host }))
    }

    fn hold(&self, why: Reason) -> Wish {
        // After a loss the job stands still: workers whose peers are gone get little time.
        let is_loss =
            matches!(&self.state.phase, Phase::Closing { cause: Cause::Lost(_) | Cause::FellOut(_), .. });
        let grace = if is_loss { Grace::Short } else { Grace::Full };
        Wish::Hold { fence: self.state.last_round, grace, why }
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::WorkerFailure;
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A coordinator with agents whose reports are written by hand.
    struct Hand {
        coordinator: Coordinator,
        now: u64,
        number: u64,
    }

    impl Hand {
        fn new(policy: Policy) -> Self {
            Hand { coordinator: Coordinator::new(9, policy, at(0)), now: 0, number: 0 }
        }

        fn report(&mut self, id: u128, doing: Doing, fence: u64) -> Report {
            self.number += 1;
            let agent =
                AgentCard { id: AgentId(id), host: format!("n{id}"), slots: 1, ..AgentCard::default() };
            Report { agent, number: self.number, doing, fence, leased: true, leaving: false, failure: None }
        }

        fn say(&mut self, id: u128, doing: Doing, fence: u64) -> Vec<(Decision, Reason)> {
            let report = self.report(id, doing, fence);
            self.coordinator.hear(at(self.now), report)
        }

        /// Rank `id - 1` fails, and the rest of the round stops.
        fn fail(&mut self, id: u128, all: &[u128]) -> Vec<(Decision, Reason)> {
            let round = self.coordinator.state().last_round;
            let (rank, ran_for) = (id as usize - 1, at(100));
            let mut report = self.report(id, Doing::Idle, round);
            report.failure = Some(WorkerFailure {
                round,
                rank,
                host: format!("n{id}"),
                ran_for,
                what: "exit code 7".into(),
            });
            let mut decided = self.coordinator.hear(at(self.now), report);
            all.iter().for_each(|id| decided.extend(self.say(*id, Doing::Idle, round)));
            decided
        }

        /// Lets time pass; `talking` agents say the same again and again.
        fn pass(&mut self, millis: u64, talking: &[(u128, Doing, u64)]) -> Vec<(Decision, Reason)> {
            let mut decided = Vec::new();
            for _ in 0..millis / 100 {
                self.now += 100;
                talking.iter().for_each(|(id, doing, fence)| decided.extend(self.say(*id, *doing, *fence)));
                decided.extend(self.coordinator.tick(at(self.now)));
            }
            decided
        }

        fn wish(&mut self, id: u128) -> Wish {
            self.coordinator.order(AgentId(id)).unwrap().wish
        }
    }

    fn nodes(min_nodes: usize, max_nodes: usize) -> Policy {
        Policy { min_nodes, max_nodes, ..Policy::default() }
    }

    const IDLE: Doing = Doing::Idle;

    #[test]
    fn the_most_nodes_begin_at_once_and_the_fewest_after_the_last_call() {
        let mut full = Hand::new(nodes(1, 2));
        full.say(1, IDLE, 0);
        assert!(matches!(full.say(2, IDLE, 0)[..], [(Decision::Form(_), Reason::Complete { nodes: 2 })]));

        let mut few = Hand::new(nodes(1, 2));
        assert_eq!(few.pass(30_000, &[(1, IDLE, 0)]), [], "the last call lasts 30 s from the first report");
        assert!(matches!(few.pass(100, &[(1, IDLE, 0)])[..], [(Decision::Form(_), _)]));
    }

    #[test]
    fn too_few_end_with_the_names_of_those_who_came() {
        let mut hand = Hand::new(nodes(3, 3));
        let decided = hand.pass(600_000, &[(1, IDLE, 0), (2, IDLE, 0)]);
        let [(Decision::End(Ending::Failure(_)), why)] = &decided[..] else { panic!("{decided:?}") };
        assert_eq!(why.to_string(), "only 2 of at least 3 nodes came: n1, n2");
    }

    #[test]
    fn a_failure_uses_one_restart_and_begins_again_at_once() {
        let mut hand = Hand::new(Policy { max_restarts: 1, ..nodes(2, 3) });
        hand.pass(31_000, &[(1, IDLE, 0), (2, IDLE, 0)]);
        let decided = hand.fail(2, &[1, 2]);
        assert!(matches!(
            decided[..],
            [(Decision::Close(_), _), (Decision::Regather(_), _), (Decision::Form(_), _)]
        ));
        assert_eq!(hand.coordinator.state().restarts, 1);
        let decided = hand.fail(2, &[1, 2]);
        assert!(
            matches!(decided.last(), Some((Decision::End(_), Reason::OutOfRestarts { .. }))),
            "{decided:?}"
        );
    }

    #[test]
    fn the_same_rank_failing_at_once_again_and_again_ends_the_job() {
        let mut hand = Hand::new(Policy { max_restarts: 100, ..nodes(2, 2) });
        hand.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
        let mut times = 0;
        let why = loop {
            times += 1;
            let mut decided = hand.fail(2, &[1, 2]);
            let round = hand.coordinator.state().last_round;
            decided.extend(hand.pass(10_000, &[(1, IDLE, round), (2, IDLE, round)]));
            if let Some((_, why)) =
                decided.into_iter().find(|(decision, _)| matches!(decision, Decision::End(_)))
            {
                break why;
            }
        };
        assert!(matches!(why, Reason::CrashLoop { times: 5, .. }), "{why}");
        assert_eq!(times, 5);
    }

    #[test]
    fn a_failure_that_follows_from_a_lost_node_uses_no_restart() {
        let mut hand = Hand::new(nodes(1, 2));
        hand.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
        hand.fail(1, &[1]);
        let decided = hand.pass(9_000, &[(1, IDLE, 1)]);
        let made: Vec<_> = decided.iter().map(|(decision, _)| decision).collect();
        let [Decision::Evict(_), Decision::Regather(Cause::Lost(host)), Decision::Form(members), ..] =
            &made[..]
        else {
            panic!("{decided:?}")
        };
        assert_eq!((host.as_str(), members.len(), hand.coordinator.state().restarts), ("n2", 1, 0));
    }

    #[test]
    fn spares_wait_and_late_ones_learn_that_the_job_is_over() {
        let mut hand = Hand::new(nodes(1, 1));
        hand.say(1, IDLE, 0);
        hand.say(2, IDLE, 0);
        assert!(matches!(hand.wish(2), Wish::Hold { fence: 1, why: Reason::Spare, .. }));
        hand.say(1, Doing::Done(1), 1);
        hand.say(3, IDLE, 0);
        assert_eq!(hand.wish(3), Wish::End(Ending::Success));
        assert!(!hand.coordinator.may_exit());
        (1..=3).for_each(|id| drop(hand.say(id, Doing::Over, 1)));
        assert!(hand.coordinator.may_exit());
    }

    #[test]
    fn workers_that_would_not_stop_end_the_job() {
        let mut hand = Hand::new(nodes(1, 2));
        hand.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
        hand.fail(1, &[]);
        let decided = hand.pass(41_000, &[(1, IDLE, 1), (2, Doing::Stopping(1), 1)]);
        assert!(
            matches!(&decided[..], [(Decision::End(_), Reason::WouldNotStop { host, .. })] if host == "n2")
        );
    }

    #[test]
    fn its_own_sleep_is_not_the_silence_of_others() {
        let mut hand = Hand::new(nodes(1, 1));
        hand.say(1, IDLE, 0);
        hand.now += 60_000;
        assert_eq!(hand.pass(100, &[]), []);
        assert!(matches!(hand.pass(6_000, &[])[0], (Decision::Evict(_), _)), "the control");
    }
}
