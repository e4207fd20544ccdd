//! The agent's state machine: its lease, its patience, and what it refuses.

use super::*;
use crate::membership::message::AgentId;

const KILL: Act = Act::Stop { round: 1, grace: Grace::None, why: Reason::LeaseOver };

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Patience ends after 4 s, the lease after 4.5 s.
fn policy() -> Policy {
    Policy::patient(at(2_000), at(500))
}

fn card() -> AgentCard {
    AgentCard { id: AgentId(1), host: "n1".into(), slots: 2, ..AgentCard::default() }
}

fn order(answers: u64, instruction: Instruction) -> Event {
    Event::Order(Order { coordinator: 9, answers, instruction })
}

fn round(number: u64) -> Instruction {
    Instruction::Run(Round::deal(number, 0, vec![card()]))
}

/// An agent that runs round 1; its first report was sent at 0 and answered at 100 ms.
fn running() -> Agent {
    let mut agent = Agent::new(card(), policy(), at(0));
    agent.step(at(0), Event::Tick);
    let acts = agent.step(at(100), order(1, round(1)));
    assert!(matches!(acts[0], Act::Start(_)), "{acts:?}");
    agent
}

#[test]
fn the_lease_counts_from_sending_and_its_end_kills_workers_that_do_not_stop() {
    let mut agent = running();
    assert_eq!(agent.lease_end(), Some(at(4500)));
    agent.step(at(3999), Event::Tick);
    assert_eq!(agent.doing(), Doing::Running(1));
    let why = Reason::StoreLost { span: at(4000) };
    let acts = agent.step(at(4000), Event::Tick);
    assert_eq!(acts[0], Act::Stop { round: 1, grace: Grace::Short, why });
    assert!(matches!(agent.step(at(4400), Event::Tick)[..], [Act::Send(_)] | []), "it stops them once");
    assert!(agent.step(at(4500), Event::Tick).contains(&KILL));
    agent.step(at(4600), Event::WorkersStopped(1));
    assert_eq!(agent.doing(), Doing::Idle);
}

#[test]
fn an_outage_within_the_host_timeout_changes_nothing() {
    // A report is sent every half second. Those sent during the outage are lost, and the next one is answered.
    let acts_of = |outage: u64| {
        let (mut agent, mut acts) = (running(), Vec::new());
        for now in (100..=100 + outage).step_by(100) {
            acts.extend(agent.step(at(now), Event::Tick));
        }
        let last = acts.iter().rev().find_map(|act| match act {
            Act::Send(report) => Some(report.number),
            _ => None,
        });
        acts.extend(agent.step(at(200 + outage), order(last.unwrap(), Instruction::Keep)));
        acts.retain(|act| !matches!(act, Act::Send(_)));
        (acts, agent.doing())
    };
    for outage in [600, 1_000, 2_000, 3_700] {
        assert_eq!(acts_of(outage), (vec![], Doing::Running(1)), "{outage} ms");
    }
    assert_eq!(acts_of(4_000).1, Doing::Stopping(1), "the control");
}

#[test]
fn a_proved_death_of_the_stores_host_ends_the_agent_at_once() {
    let mut agent = running();
    let acts = agent.step(at(300), Event::StoreDied);
    assert!(matches!(acts[0], Act::Stop { grace: Grace::Full, .. }), "{acts:?}");
    let acts = agent.step(at(400), Event::WorkersStopped(1));
    assert_eq!(acts.last(), Some(&Act::Exit(Ending::Failure(Reason::StoreDied))));
}

#[test]
fn an_agent_that_the_job_can_take_back_waits_for_the_network() {
    for (policy, waits) in [
        (policy(), false),
        (Policy { max_restarts: 1, ..policy() }, true),
        (Policy { max_nodes: 2, ..policy() }, true),
    ] {
        let mut agent = Agent::new(card(), policy, at(0));
        agent.step(at(0), Event::Tick);
        agent.step(at(100), order(1, round(1)));
        for now in (200..20_000).step_by(100) {
            agent.step(at(now), Event::Tick);
            if now == 4_600 {
                agent.step(at(now), Event::WorkersStopped(1));
            }
        }
        let expected = if waits { Doing::Idle } else { Doing::Over };
        assert_eq!(agent.doing(), expected);
    }
}

#[test]
fn an_agent_that_was_paused_kills_before_it_follows_orders() {
    let mut agent = running();
    let acts = agent.step(at(60_000), order(2, round(1)));
    assert_eq!(acts[0], KILL);
    assert!(!acts.iter().any(|act| matches!(act, Act::Exit(_))), "it reports before it gives up: {acts:?}");
}

#[test]
fn old_orders_are_refused() {
    let mut agent = running();
    agent.step(at(200), order(2, Instruction::Hold { fence: 1, why: Reason::Quiet }));
    agent.step(at(300), Event::WorkersStopped(1));
    let refused = |agent: &mut Agent, event| {
        agent.step(at(310), event);
        assert_eq!(agent.doing(), Doing::Idle);
    };
    refused(&mut agent, order(2, round(1)));
    refused(&mut agent, order(99, round(2)));
    let other = Order { coordinator: 8, answers: 2, instruction: round(2) };
    refused(&mut agent, Event::Order(other));
    agent.step(at(320), order(2, round(2)));
    assert_eq!(agent.doing(), Doing::Running(2), "the control");
}

#[test]
fn an_order_delayed_for_longer_than_the_lease_is_refused() {
    let mut agent = Agent::new(card(), policy(), at(0));
    agent.step(at(0), Event::Tick);
    agent.step(at(4500), order(1, round(1)));
    assert_eq!(agent.doing(), Doing::Idle);
    agent.step(at(4600), order(2, round(1)));
    assert_eq!(agent.doing(), Doing::Running(1), "the control");
}

#[test]
fn the_death_of_the_stores_host_ends_the_agent_within_ten_seconds() {
    let mut agent = running();
    let mut acts = Vec::new();
    for now in (200..10_000).step_by(100) {
        acts.extend(agent.step(at(now), Event::Tick));
        if now == 4600 {
            acts.extend(agent.step(at(now), Event::WorkersStopped(1)));
        }
    }
    assert!(acts.contains(&KILL));
    assert_eq!(acts.last(), Some(&Act::Exit(Ending::Failure(Reason::StoreLost { span: at(9000) }))));
}

#[test]
fn at_the_end_workers_keep_their_grace_time_while_there_is_contact() {
    let mut agent = running();
    let end = || Instruction::End(Ending::Failure(Reason::StoreHostLeft { signal: 2 }));
    let acts = agent.step(at(200), order(2, end()));
    assert!(matches!(acts[0], Act::Stop { grace: Grace::Full, .. }), "{acts:?}");
    for (beat, now) in (1000..10_000).step_by(500).enumerate() {
        let acts = agent.step(at(now), order(3 + beat as u64, end()));
        assert!(matches!(acts[..], [Act::Send(_)]), "{acts:?}");
    }
    assert!(agent.step(at(15_000), Event::Tick).contains(&KILL), "the control");
    assert!(matches!(agent.step(at(15_100), Event::WorkersStopped(1)).last(), Some(Act::Exit(_))));
}

#[test]
fn leaving_stops_the_workers_first() {
    let mut agent = running();
    let why = Reason::AskedToLeave;
    assert!(agent.step(at(200), Event::Leave).contains(&Act::Stop { round: 1, grace: Grace::Full, why }));
    agent.step(at(400), Event::WorkersStopped(1));
    let acts = agent.step(at(500), order(3, Instruction::End(Ending::Left)));
    assert_eq!(acts.last(), Some(&Act::Exit(Ending::Left)));
}
