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

    /// The hosts that are silent, and for how long.
    pub fn silent_hosts(&self, now: Duration) -> Vec<(String, Duration)> {
        let silence = |known: &Known| (known.report.agent.host.clone(), now.saturating_sub(known.heard));
        self.state.agents.values().map(silence).collect()
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
        Policy { min_nodes, max_nodes, ..Policy::patient(at(2_000), at(500)) }
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
        let [Decision::Evict(_), Decision::Regather(Cause::Lost { host, .. }), Decision::Form(members), ..] =
            &made[..]
        else {
            panic!("{decided:?}")
        };
        assert_eq!((host.as_str(), members.len(), hand.coordinator.state().restarts), ("n2", 1, 0));
    }

    /// Two of two nodes run; the second loses contact, stops its workers, and is back before it is evicted.
    fn fall_out(policy: Policy) -> (Hand, Vec<(Decision, Reason)>) {
        let mut hand = Hand::new(policy);
        hand.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
        hand.say(1, Doing::Running(1), 0);
        hand.say(2, Doing::Running(1), 0);
        let mut decided = hand.say(2, IDLE, 1);
        decided.extend(hand.say(1, IDLE, 1));
        (hand, decided)
    }

    #[test]
    fn every_restart_of_a_fixed_number_of_nodes_counts() {
        let (_, decided) = fall_out(nodes(2, 2));
        let Some((Decision::End(_), why)) = decided.last() else { panic!("{decided:?}") };
        assert!(why.to_string().contains("no contact for longer than --host-timeout"), "{why}");
        let (hand, decided) = fall_out(Policy { max_restarts: 1, ..nodes(2, 2) });
        let Some((Decision::Form(_), _)) = decided.last() else { panic!("{decided:?}") };
        let Phase::Running { round, .. } = &hand.coordinator.state().phase else { panic!() };
        assert_eq!((round.restarts, &round.after), (1, &Some(Cause::FellOut("n2".into()))));
        // A change of nodes, where they may change, is none.
        let (mut hand, decided) = fall_out(nodes(1, 2));
        assert!(decided.iter().any(|(decision, _)| matches!(decision, Decision::Regather(_))), "{decided:?}");
        hand.pass(1_000, &[(1, IDLE, 1), (2, IDLE, 1)]);
        let Phase::Running { round, .. } = &hand.coordinator.state().phase else { panic!() };
        assert_eq!((round.restarts, round.members.len()), (0, 2));
    }

    #[test]
    fn a_proved_death_is_not_waited_for_and_a_report_disproves_it() {
        let mut hand = Hand::new(Policy { max_restarts: 1, ..nodes(2, 2) });
        hand.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
        hand.coordinator.hear_of_death(at(hand.now), AgentId(2));
        hand.say(2, Doing::Running(1), 0);
        assert_eq!(hand.pass(1_500, &[(1, Doing::Running(1), 0)]), [], "it is alive");
        hand.coordinator.hear_of_death(at(hand.now), AgentId(2));
        assert_eq!(hand.pass(900, &[(1, Doing::Running(1), 0)]), [], "its workers may still run");
        let decided = hand.pass(200, &[(1, Doing::Running(1), 0)]);
        let [(Decision::Evict(_), Reason::Died { .. }), (Decision::Close(cause), _), ..] = &decided[..]
        else {
            panic!("{decided:?}")
        };
        assert_eq!(cause.to_string(), "lost the agent on n2: its process has died");
    }

    #[test]
    fn a_silent_agent_is_waited_for_and_not_taken_into_a_new_round() {
        let mut hand = Hand::new(nodes(2, 2));
        hand.say(1, IDLE, 0);
        assert_eq!(hand.pass(4_500, &[]), []);
        assert_eq!(hand.say(2, IDLE, 0), [], "the first one is silent");
        assert!(matches!(hand.say(1, IDLE, 0)[..], [(Decision::Form(_), _)]), "and is back");
    }

    #[test]
    fn nodes_with_another_host_timeout_are_refused() {
        let mut hand = Hand::new(nodes(2, 2));
        let mut report = hand.report(2, IDLE, 0);
        report.agent.host_timeout = at(5_000);
        hand.coordinator.hear(at(hand.now), report);
        let Wish::End(Ending::Failure(why)) = hand.wish(2) else { panic!("{:?}", hand.wish(2)) };
        assert_eq!(
            why.to_string(),
            "this node has --host-timeout 5s and the first one 2s; try the same on all nodes"
        );
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
        let decided = hand.pass(52_000, &[(1, IDLE, 1), (2, Doing::Stopping(1), 1)]);
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
        assert!(matches!(hand.pass(7_000, &[])[0], (Decision::Evict(_), _)), "the control");
    }
}
