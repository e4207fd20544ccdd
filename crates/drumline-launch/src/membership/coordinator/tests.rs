//! Tests of the coordinator with handwritten reports.

use super::*;
use crate::membership::message::WorkerFailure;

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A coordinator, and helpers that write the reports of its agents.
struct Script {
    coordinator: Coordinator,
    now: u64,
    number: u64,
}

impl Script {
    fn new(policy: Policy) -> Self {
        Script { coordinator: Coordinator::new(9, policy, at(0)), now: 0, number: 0 }
    }

    fn report(&mut self, id: u128, doing: Doing, fence: u64) -> Report {
        self.number += 1;
        let agent = AgentCard { id: AgentId(id), host: format!("n{id}"), slots: 1, ..AgentCard::default() };
        Report { agent, number: self.number, doing, fence, leased: true, leaving: false, failure: None }
    }

    fn send(&mut self, id: u128, doing: Doing, fence: u64) -> Vec<(Decision, Reason)> {
        let report = self.report(id, doing, fence);
        self.coordinator.receive_report(at(self.now), report)
    }

    /// Rank `id - 1` fails, and the rest of the round stops.
    fn fail(&mut self, id: u128, all: &[u128]) -> Vec<(Decision, Reason)> {
        let round = self.coordinator.state().last_round;
        let (rank, ran_for) = (id as usize - 1, at(100));
        let mut report = self.report(id, Doing::Idle, round);
        report.failure =
            Some(WorkerFailure { round, rank, host: format!("n{id}"), ran_for, what: "exit code 7".into() });
        let mut decided = self.coordinator.receive_report(at(self.now), report);
        all.iter().for_each(|id| decided.extend(self.send(*id, Doing::Idle, round)));
        decided
    }

    /// Lets time pass; the `talking` agents repeat the same report.
    fn pass(&mut self, millis: u64, talking: &[(u128, Doing, u64)]) -> Vec<(Decision, Reason)> {
        let mut decided = Vec::new();
        for _ in 0..millis / 100 {
            self.now += 100;
            talking.iter().for_each(|(id, doing, fence)| decided.extend(self.send(*id, *doing, *fence)));
            decided.extend(self.coordinator.tick(at(self.now)));
        }
        decided
    }

    fn instruction(&mut self, id: u128) -> Instruction {
        self.coordinator.order(AgentId(id)).unwrap().instruction
    }
}

fn nodes(min_nodes: usize, max_nodes: usize) -> Policy {
    Policy { min_nodes, max_nodes, ..Policy::patient(at(2_000), at(500)) }
}

const IDLE: Doing = Doing::Idle;

#[test]
fn max_nodes_start_at_once_and_min_nodes_after_the_last_call() {
    let mut full = Script::new(nodes(1, 2));
    full.send(1, IDLE, 0);
    assert!(matches!(full.send(2, IDLE, 0)[..], [(Decision::Form(_), Reason::Complete { nodes: 2 })]));

    let mut few = Script::new(nodes(1, 2));
    assert_eq!(few.pass(30_000, &[(1, IDLE, 0)]), [], "the last call lasts 30 s from the first report");
    assert!(matches!(few.pass(100, &[(1, IDLE, 0)])[..], [(Decision::Form(_), _)]));
}

#[test]
fn too_few_nodes_fail_with_the_names_of_those_that_joined() {
    let mut script = Script::new(nodes(3, 3));
    let decided = script.pass(600_000, &[(1, IDLE, 0), (2, IDLE, 0)]);
    let [(Decision::End(Ending::Failure(_)), why)] = &decided[..] else { panic!("{decided:?}") };
    assert_eq!(why.to_string(), "only 2 of at least 3 nodes joined: n1, n2");
}

#[test]
fn a_failure_uses_one_restart_and_restarts_at_once() {
    let mut script = Script::new(Policy { max_restarts: 1, ..nodes(2, 3) });
    script.pass(31_000, &[(1, IDLE, 0), (2, IDLE, 0)]);
    let decided = script.fail(2, &[1, 2]);
    assert!(matches!(
        decided[..],
        [(Decision::Close(_), _), (Decision::Regather(_), _), (Decision::Form(_), _)]
    ));
    assert_eq!(script.coordinator.state().restarts, 1);
    let decided = script.fail(2, &[1, 2]);
    assert!(matches!(decided.last(), Some((Decision::End(_), Reason::OutOfRestarts { .. }))), "{decided:?}");
}

#[test]
fn a_crash_loop_ends_the_job() {
    let mut script = Script::new(Policy { max_restarts: 100, ..nodes(2, 2) });
    script.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
    let mut times = 0;
    let why = loop {
        times += 1;
        let mut decided = script.fail(2, &[1, 2]);
        let round = script.coordinator.state().last_round;
        decided.extend(script.pass(10_000, &[(1, IDLE, round), (2, IDLE, round)]));
        if let Some((_, why)) = decided.into_iter().find(|(decision, _)| matches!(decision, Decision::End(_)))
        {
            break why;
        }
    };
    assert!(matches!(why, Reason::CrashLoop { times: 5, .. }), "{why}");
    assert_eq!(times, 5);
}

#[test]
fn a_failure_caused_by_a_lost_node_uses_no_restart() {
    let mut script = Script::new(nodes(1, 2));
    script.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
    script.fail(1, &[1]);
    let decided = script.pass(9_000, &[(1, IDLE, 1)]);
    let decisions: Vec<_> = decided.iter().map(|(decision, _)| decision).collect();
    let [Decision::Evict(_), Decision::Regather(Cause::Lost { host, .. }), Decision::Form(members), ..] =
        &decisions[..]
    else {
        panic!("{decided:?}")
    };
    assert_eq!((host.as_str(), members.len(), script.coordinator.state().restarts), ("n2", 1, 0));
}

/// Two of two nodes run; the second loses contact, stops its workers, and is back before it is evicted.
fn fall_out(policy: Policy) -> (Script, Vec<(Decision, Reason)>) {
    let mut script = Script::new(policy);
    script.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
    script.send(1, Doing::Running(1), 0);
    script.send(2, Doing::Running(1), 0);
    let mut decided = script.send(2, IDLE, 1);
    decided.extend(script.send(1, IDLE, 1));
    (script, decided)
}

#[test]
fn with_a_fixed_number_of_nodes_every_restart_counts() {
    let (_, decided) = fall_out(nodes(2, 2));
    let Some((Decision::End(_), why)) = decided.last() else { panic!("{decided:?}") };
    assert!(why.to_string().contains("no contact for longer than --host-timeout"), "{why}");
    let (script, decided) = fall_out(Policy { max_restarts: 1, ..nodes(2, 2) });
    let Some((Decision::Form(_), _)) = decided.last() else { panic!("{decided:?}") };
    let Phase::Running { round, .. } = &script.coordinator.state().phase else { panic!() };
    assert_eq!((round.restarts, &round.after), (1, &Some(Cause::FellOut("n2".into()))));
    // In an elastic job, a change of nodes uses no restart.
    let (mut script, decided) = fall_out(nodes(1, 2));
    assert!(decided.iter().any(|(decision, _)| matches!(decision, Decision::Regather(_))), "{decided:?}");
    script.pass(1_000, &[(1, IDLE, 1), (2, IDLE, 1)]);
    let Phase::Running { round, .. } = &script.coordinator.state().phase else { panic!() };
    assert_eq!((round.restarts, round.members.len()), (0, 2));
}

#[test]
fn a_proved_death_skips_the_host_timeout_and_a_report_disproves_it() {
    let mut script = Script::new(Policy { max_restarts: 1, ..nodes(2, 2) });
    script.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
    script.coordinator.receive_death_proof(at(script.now), AgentId(2));
    script.send(2, Doing::Running(1), 0);
    assert_eq!(script.pass(1_500, &[(1, Doing::Running(1), 0)]), [], "it is alive");
    script.coordinator.receive_death_proof(at(script.now), AgentId(2));
    assert_eq!(script.pass(900, &[(1, Doing::Running(1), 0)]), [], "its workers may still run");
    let decided = script.pass(200, &[(1, Doing::Running(1), 0)]);
    let [(Decision::Evict(_), Reason::Died { .. }), (Decision::Close(cause), _), ..] = &decided[..] else {
        panic!("{decided:?}")
    };
    assert_eq!(cause.to_string(), "lost the agent on n2: its process has died");
}

#[test]
fn a_silent_agent_is_kept_but_not_put_into_a_new_round() {
    let mut script = Script::new(nodes(2, 2));
    script.send(1, IDLE, 0);
    assert_eq!(script.pass(4_500, &[]), []);
    assert_eq!(script.send(2, IDLE, 0), [], "agent 1 is silent");
    assert!(matches!(script.send(1, IDLE, 0)[..], [(Decision::Form(_), _)]), "agent 1 is back");
}

#[test]
fn nodes_with_another_host_timeout_are_refused() {
    let mut script = Script::new(nodes(2, 2));
    let mut report = script.report(2, IDLE, 0);
    report.agent.host_timeout = at(5_000);
    script.coordinator.receive_report(at(script.now), report);
    let Instruction::End(Ending::Failure(why)) = script.instruction(2) else {
        panic!("{:?}", script.instruction(2))
    };
    assert_eq!(
        why.to_string(),
        "this node has --host-timeout 5s and the first one 2s; try the same on all nodes"
    );
}

#[test]
fn spares_wait_and_late_agents_learn_that_the_job_is_over() {
    let mut script = Script::new(nodes(1, 1));
    script.send(1, IDLE, 0);
    script.send(2, IDLE, 0);
    assert!(matches!(script.instruction(2), Instruction::Hold { fence: 1, why: Reason::Spare, .. }));
    script.send(1, Doing::Done(1), 1);
    script.send(3, IDLE, 0);
    assert_eq!(script.instruction(3), Instruction::End(Ending::Success));
    assert!(!script.coordinator.may_exit());
    (1..=3).for_each(|id| drop(script.send(id, Doing::Over, 1)));
    assert!(script.coordinator.may_exit());
}

#[test]
fn workers_that_would_not_stop_end_the_job() {
    let mut script = Script::new(nodes(1, 2));
    script.pass(100, &[(1, IDLE, 0), (2, IDLE, 0)]);
    script.fail(1, &[]);
    let decided = script.pass(52_000, &[(1, IDLE, 1), (2, Doing::Stopping(1), 1)]);
    assert!(matches!(&decided[..], [(Decision::End(_), Reason::WouldNotStop { host, .. })] if host == "n2"));
}

#[test]
fn its_own_pause_does_not_count_as_silence_of_others() {
    let mut script = Script::new(nodes(1, 1));
    script.send(1, IDLE, 0);
    script.now += 60_000;
    assert_eq!(script.pass(100, &[]), []);
    assert!(matches!(script.pass(7_000, &[])[0], (Decision::Evict(_), _)), "control: real silence evicts");
}
