//! Plays thousands of random histories, with controls that show that a broken rule is detected.
//!
//! ```text
//!   0 ────────── faults ──────────▶ all healed ── 20 s ──▶ must be complete ── workers end ──▶ must be over
//! ```
//!
//! A failing history prints its seed and its last events; the same seed replays the same history.

use std::time::Duration;

use super::simulator::{Dice, Frozen, STEP, Setup, World};
use super::*;

const HISTORIES: u64 = 3000;

/// Which rule is broken on purpose.
#[derive(Clone, Copy, PartialEq)]
enum Broken {
    Nothing,
    /// Agents never stop by themselves.
    NoLease,
    /// Agents are evicted before their lease is over.
    EarlyEviction,
    /// Nothing watches the lease of a frozen agent.
    NoWatch,
    /// Workers outlive an agent that was killed.
    NoKeeper,
}

fn setup(dice: &mut Dice, broken: Broken) -> Setup {
    let nodes = dice.roll(2, 6) as usize;
    let min_nodes = dice.roll(1, nodes as u64) as usize;
    let host_timeout = Duration::from_millis(dice.roll(1_000, 4_000));
    let policy = Policy {
        min_nodes,
        max_nodes: dice.roll(min_nodes as u64, nodes as u64 + 1) as usize,
        join_timeout: Duration::from_secs(20),
        last_call: Duration::from_secs(2),
        max_restarts: dice.roll(0, 6) as usize,
        back_off: BackOff { first: Duration::from_millis(500), longest: Duration::from_secs(2) },
        ..Policy::patient(host_timeout, HEARTBEAT)
    };
    policy.check().unwrap();
    let mut coordinators = policy.clone();
    let mut agents = policy;
    match broken {
        Broken::NoLease => {
            agents.patience = Duration::from_secs(1800);
            agents.lease = Duration::from_secs(3600);
        }
        Broken::EarlyEviction => coordinators.evict_after = Duration::from_secs(2),
        Broken::Nothing | Broken::NoWatch | Broken::NoKeeper => {}
    }
    let is_watched = broken != Broken::NoWatch;
    let outlive = if broken == Broken::NoKeeper { 5_000 } else { 900 };
    Setup { nodes, policy: coordinators, agent_policy: agents, is_watched, outlive }
}

/// One random fault, or a new agent.
fn fault(world: &mut World, may_host_die: bool) {
    let last = world.nodes.len() as u64 - 1;
    let node = world.dice.roll(0, last) as usize;
    let until = world.now + world.dice.roll(200, 12_000);
    let may_die = node != 0 || may_host_die;
    let kind = world.dice.roll(0, 13);
    world.log.push(format!("{:>6} fault {kind} on node{node} until {until}", world.now));
    match kind {
        0 if may_die => world.crash(node),
        1 if may_die => {
            world.crash(node);
            world.nodes[node].workers = None;
        }
        2 => {
            world.nodes[node].frozen.get_or_insert((Frozen::Agent, until));
        }
        3 => {
            world.nodes[node].frozen.get_or_insert((Frozen::Node, until));
        }
        4 => world.nodes[node].deaf_until = until,
        5 => world.nodes[node].mute_until = until,
        6 => world.cut_off(node, until),
        7 => world.loss = world.dice.roll(0, 30),
        8 | 9 => world.fail(node),
        10 if may_die => world.leave(node),
        _ => {
            // The store's host is started once: a launcher restarted there would be a new job.
            let node = node.max(1);
            world.start(node);
        }
    }
}

fn heal(world: &mut World) {
    world.loss = 0;
    let now = world.now;
    for node in &mut world.nodes {
        (node.deaf_until, node.mute_until) = (now, now);
        if let Some((_, until)) = &mut node.frozen {
            *until = now;
        }
    }
}

fn pass(world: &mut World, span: u64) -> Result<(), String> {
    (0..span / STEP).try_for_each(|_| world.step())
}

/// How many agents want to take part.
fn willing(world: &World) -> usize {
    world.nodes.iter().filter(|node| node.agent.is_some() && !node.leaving).count()
}

/// Checks, after the last fault, that the round has every agent there is room for and all of them run, unless there is
/// a reason.
fn check_complete(world: &World) -> Result<(), String> {
    let Some(coordinator) = &world.coordinator else {
        let left = world.nodes.iter().filter(|node| node.workers.is_some()).count();
        return if left == 0 {
            Ok(())
        } else {
            Err(format!("{left} nodes' workers outlive the store's host"))
        };
    };
    let policy = &world.setup.policy;
    match &coordinator.state().phase {
        Phase::Over(_) => Ok(()),
        Phase::Gathering { .. } if willing(world) < policy.min_nodes => Ok(()),
        Phase::Running { round, .. } => {
            let runs = |node: &&simulator::Node| {
                node.agent.as_ref().is_some_and(|(_, agent)| agent.doing() == Doing::Running(round.number))
            };
            let running = world.nodes.iter().filter(runs).count();
            let wanted = willing(world).min(policy.max_nodes);
            let is_complete = running == round.members.len() && running == wanted;
            if is_complete { Ok(()) } else { Err(format!("{running} run of {wanted} in {round:?}")) }
        }
        phase => Err(format!("20 s after the last fault: {phase:?}")),
    }
}

/// Checks, at the end, that the job is over, every agent knows it, and a job that was complete succeeded.
fn check_over(world: &World, must_succeed: bool) -> Result<(), String> {
    if let Some(node) = world.nodes.iter().position(|node| node.agent.is_some()) {
        return Err(format!("the agent on node{node} never ended"));
    }
    if world.nodes.iter().any(|node| node.workers.is_some()) {
        return Err("workers are left behind".into());
    }
    let Some(coordinator) = &world.coordinator else { return Ok(()) };
    match &coordinator.state().phase {
        Phase::Over(_) if !coordinator.may_exit() => Err("the coordinator may not exit".into()),
        Phase::Over(ending) if must_succeed && *ending != Ending::Success => Err(format!("{ending}")),
        Phase::Over(_) => Ok(()),
        phase => Err(format!("never over: {phase:?}")),
    }
}

/// Plays the history of `seed`. Returns the final world, and the first broken promise.
fn play(seed: u64, broken: Broken) -> (World, Result<(), String>) {
    let mut dice = Dice(seed);
    let setup = setup(&mut dice, broken);
    let may_host_die = dice.chance(15);
    let mut world = World::new(dice, setup);
    let result = play_history(&mut world, may_host_die, broken);
    (world, result)
}

fn play_history(world: &mut World, may_host_die: bool, broken: Broken) -> Result<(), String> {
    world.start(0);
    let span = world.dice.roll(5_000, 40_000);
    let rate = world.dice.roll(1, 4);
    for node in 1..world.nodes.len() {
        if world.dice.chance(80) {
            world.start(node);
        }
    }
    while world.now < span {
        if world.dice.chance(rate) {
            fault(world, may_host_die);
        }
        world.step()?;
    }
    heal(world);
    pass(world, 20_000)?;
    if broken == Broken::Nothing {
        check_complete(world)?;
    }
    let runs = |coordinator: &Coordinator| matches!(coordinator.state().phase, Phase::Running { .. });
    let must_succeed = world.coordinator.as_ref().is_some_and(runs);
    world.is_finishing = true;
    pass(world, 40_000)?;
    if broken == Broken::Nothing { check_over(world, must_succeed) } else { Ok(()) }
}

/// The text of a violation, with the last events.
fn explained(world: &World, seed: u64, violation: &str) -> String {
    let tail = world.log.len().saturating_sub(60);
    format!("seed {seed}: {violation}\n{}", world.log[tail..].join("\n"))
}

#[test]
fn random_histories_keep_every_promise() {
    let (mut successes, mut failures, mut hostless, mut rounds) = (0, 0, 0, 0);
    for seed in 0..HISTORIES {
        let (world, result) = play(seed, Broken::Nothing);
        if let Err(violation) = result {
            panic!("{}", explained(&world, seed, &violation));
        }
        let Some(coordinator) = &world.coordinator else {
            hostless += 1;
            continue;
        };
        rounds += coordinator.state().last_round;
        match &coordinator.state().phase {
            Phase::Over(Ending::Success) => successes += 1,
            _ => failures += 1,
        }
    }
    println!(
        "{successes} succeeded, {failures} failed with a reason, {hostless} lost their host, {rounds} rounds"
    );
    // The histories must be meaningful: many endings of each kind, many rounds.
    assert!(successes > HISTORIES / 10 && failures > HISTORIES / 10 && hostless > HISTORIES / 100);
    assert!(rounds > HISTORIES);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..20 {
        assert_eq!(play(seed, Broken::Nothing).0.log, play(seed, Broken::Nothing).0.log, "seed {seed}");
    }
}

/// A control: the broken rule must be detected as two rounds that run at once.
fn is_detected(broken: Broken) -> bool {
    (0..HISTORIES).any(|seed| play(seed, broken).1.is_err_and(|violation| violation.ends_with("run at once")))
}

/// Nodes that all run one round, with several outages of up to `longest`. Returns the world, and how many outages there
/// were.
fn outages(seed: u64, longest: impl Fn(&Policy) -> u64) -> (World, u64) {
    let mut dice = Dice(seed);
    let mut setup = setup(&mut dice, Broken::Nothing);
    setup.policy.max_nodes = setup.nodes;
    setup.agent_policy = setup.policy.clone();
    let longest = longest(&setup.policy);
    let mut world = World::new(dice, setup);
    (0..world.nodes.len()).for_each(|node| world.start(node));
    pass(&mut world, 4_000).unwrap();
    let number = world.dice.roll(1, 6);
    for _ in 0..number {
        let span = world.dice.roll(longest / 2, longest);
        let until = world.now + span;
        // One node is cut off. If that is the store's host, all others are.
        let last = world.nodes.len() as u64 - 1;
        let cut = world.dice.roll(0, last) as usize;
        (1..world.nodes.len())
            .filter(|node| cut == 0 || cut == *node)
            .for_each(|node| world.cut_off(node, until));
        let quiet = world.dice.roll(2_000, 4_000);
        pass(&mut world, span + quiet).unwrap();
    }
    (world, number)
}

fn rounds(world: &World) -> u64 {
    world.coordinator.as_ref().map_or(0, |coordinator| coordinator.state().last_round)
}

#[test]
fn outages_within_the_host_timeout_change_nothing() {
    for seed in 0..HISTORIES / 4 {
        let (world, number) = outages(seed, |policy| policy.host_timeout.as_millis() as u64);
        let is_stopped = world.log.iter().any(|line| line.contains("Stop {") || line.contains("Exit("));
        let is_untouched = rounds(&world) == 1 && !is_stopped;
        assert!(is_untouched, "{}", explained(&world, seed, &format!("{number} outages were not tolerated")));
    }
}

#[test]
fn outages_longer_than_every_timeout_are_noticed() {
    for seed in 0..HISTORIES / 30 {
        let (world, _) = outages(seed, |policy| 4 * policy.evict_after.as_millis() as u64);
        assert!(
            world.log.iter().any(|line| line.contains("Stop {")),
            "{}",
            explained(&world, seed, "nobody noticed")
        );
    }
}

#[test]
fn without_a_keeper_a_dead_agents_workers_run_beside_the_next_round() {
    assert!(is_detected(Broken::NoKeeper));
}

#[test]
fn without_a_lease_two_rounds_run_at_once() {
    assert!(is_detected(Broken::NoLease));
}

#[test]
fn with_an_eviction_before_the_end_of_the_lease_two_rounds_run_at_once() {
    assert!(is_detected(Broken::EarlyEviction));
}

#[test]
fn without_a_watch_a_frozen_agents_workers_run_beside_the_next_round() {
    assert!(is_detected(Broken::NoWatch));
}
