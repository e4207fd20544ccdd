//! A coordinator whose agents are written by hand.

use super::*;
use crate::membership::message::WorkerFailure;

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
        let agent = AgentCard { id: AgentId(id), host: format!("n{id}"), slots: 1, ..AgentCard::default() };
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
        report.failure =
            Some(WorkerFailure { round, rank, host: format!("n{id}"), ran_for, what: "exit code 7".into() });
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
    assert!(matches!(decided.last(), Some((Decision::End(_), Reason::OutOfRestarts { .. }))), "{decided:?}");
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
        if let Some((_, why)) = decided.into_iter().find(|(decision, _)| matches!(decision, Decision::End(_)))
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
    let [(Decision::Evict(_), Reason::Died { .. }), (Decision::Close(cause), _), ..] = &decided[..] else {
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
    assert!(matches!(&decided[..], [(Decision::End(_), Reason::WouldNotStop { host, .. })] if host == "n2"));
}

#[test]
fn its_own_sleep_is_not_the_silence_of_others() {
    let mut hand = Hand::new(nodes(1, 1));
    hand.say(1, IDLE, 0);
    hand.now += 60_000;
    assert_eq!(hand.pass(100, &[]), []);
    assert!(matches!(hand.pass(7_000, &[])[0], (Decision::Evict(_), _)), "the control");
}
