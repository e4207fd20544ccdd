//! A simulated cluster: agents, their workers and the coordinator, with an unreliable network and unsynchronized
//! clocks.
//!
//! Time advances in steps of 50 ms. Each node has its own clock with its own offset. Messages are delayed, so they
//! overtake each other. They are also lost and duplicated. After each step the invariants are checked against the
//! workers themselves, not against what the state machines believe.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;

pub(super) const STEP: u64 = 50;

/// A seeded generator (splitmix64): the same seed gives the same history.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `low..=high`.
    pub(super) fn roll(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// True in `percent` of a hundred cases.
    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.roll(0, 99) < percent
    }
}

/// What is paused when a node is frozen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Frozen {
    /// Only the agent; its workers keep running.
    Agent,
    /// Agent and workers.
    Node,
}

pub(super) struct Workers {
    round: u64,
    ranks: std::ops::Range<usize>,
    started: u64,
    dies_at: Option<u64>,
}

/// One node, with or without an agent.
#[derive(Default)]
pub(super) struct Node {
    pub(super) agent: Option<(AgentId, Agent)>,
    pub(super) leaving: bool,
    pub(super) workers: Option<Workers>,
    pub(super) ending: Option<Ending>,
    pub(super) frozen: Option<(Frozen, u64)>,
    /// Until when it receives nothing, and until when it sends nothing.
    pub(super) deaf_until: u64,
    pub(super) mute_until: u64,
    clock: u64,
    inbox: Vec<Event>,
}

enum Mail {
    Report(usize, Report),
    Order(usize, AgentId, Order),
    /// The proof that this agent's process has ended.
    Death(AgentId),
    /// The same for the store's host, for the agent on this node.
    StoreDeath(usize),
}

/// How the world is set up.
pub(super) struct Setup {
    pub(super) nodes: usize,
    pub(super) policy: Policy,
    /// The agents' policy; it differs from the coordinator's only in controls.
    pub(super) agent_policy: Policy,
    /// Whether something outside the agent watches the end of the lease.
    pub(super) is_watched: bool,
    /// Workers outlive their agent by up to this time.
    pub(super) outlive: u64,
}

pub(super) struct World {
    pub(super) now: u64,
    pub(super) dice: Dice,
    pub(super) setup: Setup,
    pub(super) nodes: Vec<Node>,
    /// On node 0.
    pub(super) coordinator: Option<Coordinator>,
    pub(super) loss: u64,
    pub(super) is_finishing: bool,
    pub(super) log: Vec<String>,
    mail: Vec<(u64, Mail)>,
    next_id: u128,
    agreed: BTreeSet<AgentId>,
    rounds: BTreeMap<u64, Round>,
    restarts: usize,
    violation: Option<String>,
}

impl World {
    pub(super) fn new(mut dice: Dice, setup: Setup) -> Self {
        let clock = |dice: &mut Dice| Node { clock: dice.roll(0, 1_000_000_000), ..Node::default() };
        let nodes: Vec<Node> = (0..setup.nodes).map(|_| clock(&mut dice)).collect();
        let now = Duration::from_millis(nodes[0].clock);
        World {
            now: 0,
            dice,
            coordinator: Some(Coordinator::new(7, setup.policy.clone(), now)),
            setup,
            nodes,
            loss: 0,
            is_finishing: false,
            log: Vec::new(),
            mail: Vec::new(),
            next_id: 0,
            agreed: BTreeSet::new(),
            rounds: BTreeMap::new(),
            restarts: 0,
            violation: None,
        }
    }

    /// Lets one step of time pass, and checks the invariants.
    pub(super) fn step(&mut self) -> Result<(), String> {
        self.now += STEP;
        self.thaw();
        self.deliver();
        self.coordinate(|coordinator, now| coordinator.tick(now), None);
        for node in 0..self.nodes.len() {
            self.work(node);
            self.wake(node);
        }
        self.check()
    }

    /// Starts a new agent on a node that has none.
    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].agent.is_some() {
            return;
        }
        self.next_id += 1;
        let id = AgentId(self.next_id);
        let card = AgentCard { id, host: format!("node{node}"), slots: 1 + node % 3, ..AgentCard::default() };
        let agent = Agent::new(card, self.setup.agent_policy.clone(), self.clock(node));
        let place = &mut self.nodes[node];
        place.agent = Some((id, agent));
        place.leaving = false;
        place.ending = None;
        place.inbox = Vec::new();
        place.frozen = None;
    }

    /// Kills the agent. The kernel ends its workers a little later. With some luck the agent's end is proved.
    pub(super) fn crash(&mut self, node: usize) {
        let dies_at = self.now + self.dice.roll(0, self.setup.outlive);
        let is_proved = self.dice.chance(50);
        if is_proved {
            self.prove_death(node);
        }
        let place = &mut self.nodes[node];
        place.agent = None;
        if let Some(workers) = &mut place.workers {
            workers.dies_at = Some(workers.dies_at.map_or(dies_at, |earlier| earlier.min(dies_at)));
        }
        if node == 0 {
            self.coordinator = None;
        }
    }

    fn prove_death(&mut self, node: usize) {
        let is_reachable = |place: &Node, now: u64| place.deaf_until <= now && place.mute_until <= now;
        let mut proofs = Vec::new();
        if node == 0 {
            let others = self.nodes.iter().enumerate().skip(1);
            let others = others.filter(|(_, other)| is_reachable(other, self.now));
            proofs.extend(others.map(|(other, _)| Mail::StoreDeath(other)));
        } else if let (Some((id, _)), true) =
            (&self.nodes[node].agent, is_reachable(&self.nodes[node], self.now))
        {
            proofs.push(Mail::Death(*id));
        }
        for proof in proofs {
            let at = self.now + self.dice.roll(0, 300);
            self.mail.push((at, proof));
        }
    }

    /// Cuts a node off until then: messages from it and to it are lost.
    pub(super) fn cut_off(&mut self, node: usize, until: u64) {
        (self.nodes[node].deaf_until, self.nodes[node].mute_until) = (until, until);
    }

    /// Makes a worker of the node fail.
    pub(super) fn fail(&mut self, node: usize) {
        let now = self.now;
        let place = &mut self.nodes[node];
        if let Some(Workers { round, ranks, started, dies_at: None }) = &place.workers {
            let (rank, ran_for) = (ranks.start, Duration::from_millis(now - started));
            let failure = WorkerFailure {
                round: *round,
                rank,
                host: "here".into(),
                ran_for,
                what: "exit code 1".into(),
            };
            place.inbox.push(Event::WorkerFailed(failure));
        }
    }

    pub(super) fn leave(&mut self, node: usize) {
        if self.nodes[node].agent.is_some() {
            self.nodes[node].leaving = true;
            self.nodes[node].inbox.push(Event::Leave);
        }
        if let (0, Some(coordinator)) = (node, &mut self.coordinator) {
            coordinator.host_leaves(15);
        }
    }

    fn clock(&self, node: usize) -> Duration {
        Duration::from_millis(self.nodes[node].clock + self.now)
    }

    fn thaw(&mut self) {
        for node in 0..self.nodes.len() {
            let clock = self.clock(node);
            let place = &mut self.nodes[node];
            let Some((kind, until)) = place.frozen else { continue };
            if until > self.now {
                continue;
            }
            place.frozen = None;
            let is_over =
                place.agent.as_ref().and_then(|(_, agent)| agent.lease_end()).is_none_or(|end| end <= clock);
            // On a node that wakes, the watch's timer fires before anything else runs.
            if kind == Frozen::Node && is_over && self.setup.is_watched {
                place.inbox.extend(place.workers.take().map(|workers| Event::WorkersStopped(workers.round)));
            }
        }
    }

    fn post(&mut self, node: usize, mail: Mail) {
        let is_local = node == 0;
        let place = &self.nodes[node];
        let cut = match mail {
            Mail::Report(..) => place.mute_until,
            Mail::Order(..) => place.deaf_until,
            Mail::Death(_) | Mail::StoreDeath(_) => 0,
        };
        if !is_local && (cut > self.now || self.dice.chance(self.loss)) {
            return;
        }
        let delay = if is_local { 0 } else { self.dice.roll(0, 300) };
        if let (true, Mail::Order(_, id, order)) = (self.dice.chance(5), &mail) {
            let again = self.now + delay + self.dice.roll(0, 9_000);
            self.mail.push((again, Mail::Order(node, *id, order.clone())));
        }
        if let (true, Mail::Report(_, report)) = (self.dice.chance(5), &mail) {
            self.mail.push((self.now + delay + self.dice.roll(0, 900), Mail::Report(node, report.clone())));
        }
        self.mail.push((self.now + delay, mail));
    }

    fn deliver(&mut self) {
        let now = self.now;
        let (mut due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.mail).into_iter().partition(|(at, _)| *at <= now);
        self.mail = later;
        due.sort_by_key(|(at, _)| *at);
        for (_, mail) in due {
            match mail {
                Mail::Order(node, id, order) => {
                    let place = &mut self.nodes[node];
                    if place.agent.as_ref().is_some_and(|(known, _)| *known == id) {
                        place.inbox.push(Event::Order(order));
                    }
                }
                Mail::Report(node, report) => self.receive(node, report),
                Mail::Death(id) if self.nodes[0].frozen.is_some() => {
                    self.mail.push((self.now + STEP, Mail::Death(id)));
                }
                Mail::Death(id) => {
                    self.coordinate(|coordinator, now| coordinator.receive_death_proof(now, id), None)
                }
                Mail::StoreDeath(node) => self.nodes[node].inbox.push(Event::StoreDied),
            }
        }
    }

    fn receive(&mut self, node: usize, report: Report) {
        if self.nodes[0].frozen.is_some() {
            self.mail.push((self.now + STEP, Mail::Report(node, report)));
            return;
        }
        let id = report.agent.id;
        self.coordinate(|coordinator, now| coordinator.receive_report(now, report), Some((node, id)));
    }

    fn coordinate<F>(&mut self, act: F, answer: Option<(usize, AgentId)>)
    where
        F: FnOnce(&mut Coordinator, Duration) -> Vec<(Decision, Reason)>,
    {
        let clock = self.clock(0);
        let Some(mut coordinator) = self.coordinator.take() else { return };
        if self.nodes[0].frozen.is_none() {
            let decided = act(&mut coordinator, clock);
            decided.iter().for_each(|(decision, reason)| self.check_decision(decision, reason));
            let everyone = || coordinator.agents().into_iter().map(|id| (self.home(id), id)).collect();
            let to: Vec<_> = if decided.is_empty() { answer.into_iter().collect() } else { everyone() };
            for (node, id) in to {
                if let Some(order) = coordinator.order(id) {
                    self.post(node, Mail::Order(node, id, order));
                }
            }
            if coordinator.state().restarts > self.setup.policy.max_restarts {
                self.violation = Some("more restarts than allowed".into());
            }
        }
        self.coordinator = Some(coordinator);
    }

    fn home(&self, id: AgentId) -> usize {
        let is_home = |node: &Node| node.agent.as_ref().is_some_and(|(known, _)| *known == id);
        self.nodes.iter().position(is_home).unwrap_or(1)
    }

    /// Logs a decision, and checks the invariants that concern it.
    fn check_decision(&mut self, decision: &Decision, reason: &Reason) {
        self.log.push(format!("{:>6} coordinator: {decision:?}; {reason}", self.now));
        match decision {
            Decision::Form(cards) if cards.iter().any(|card| !self.agreed.contains(&card.id)) => {
                self.violation = Some("a member never agreed".into());
            }
            Decision::Regather(cause)
                if !self.setup.policy.is_elastic() || matches!(cause, Cause::Failed(_)) =>
            {
                self.restarts += 1;
            }
            _ => {}
        }
        if self.restarts > self.setup.policy.max_restarts {
            self.violation = Some("more rounds after failures than restarts".into());
        }
    }

    /// Advances the workers of a node.
    fn work(&mut self, node: usize) {
        let (now, clock) = (self.now, self.clock(node));
        let kill = self.dice.roll(0, 900);
        let is_end = self.is_finishing && self.dice.chance(20);
        let is_watched = self.setup.is_watched;
        let place = &mut self.nodes[node];
        let Some(workers) = &mut place.workers else { return };
        let round = workers.round;
        if let Some((Frozen::Node, _)) = place.frozen {
            return;
        }
        let lease_end = place.agent.as_ref().and_then(|(_, agent)| agent.lease_end());
        let is_over = lease_end.is_some_and(|end| end <= clock);
        if is_over && is_watched && place.frozen.is_some() {
            workers.dies_at = Some(workers.dies_at.map_or(now + kill, |earlier| earlier.min(now + kill)));
        }
        if workers.dies_at.is_some_and(|at| at <= now) {
            place.workers = None;
            place.inbox.push(Event::WorkersStopped(round));
        } else if workers.dies_at.is_none() && is_end {
            place.workers = None;
            place.inbox.push(Event::WorkersDone(round));
        }
    }

    /// Lets an agent that is not frozen process its events, in order.
    fn wake(&mut self, node: usize) {
        if self.nodes[node].frozen.is_some() {
            return;
        }
        let clock = self.clock(node);
        let mut events = vec![Event::Tick];
        events.append(&mut self.nodes[node].inbox);
        for event in events {
            let Some((_, agent)) = &mut self.nodes[node].agent else { return };
            for act in agent.step(clock, event) {
                self.act(node, act);
            }
        }
    }

    fn act(&mut self, node: usize, act: Act) {
        let Some((id, _)) = self.nodes[node].agent else { return };
        if !matches!(act, Act::Send(_)) {
            self.log.push(format!("{:>6} node{node} {id:?}: {act:?}", self.now));
        }
        match act {
            Act::Send(report) => {
                if report.doing == Doing::Idle && report.leased {
                    self.agreed.insert(id);
                }
                self.post(node, Mail::Report(node, report));
            }
            Act::Start(round) => self.start_workers(node, id, &round),
            Act::Stop { round, grace, .. } => self.stop_workers(node, round, grace),
            Act::Exit(ending) => {
                let place = &mut self.nodes[node];
                (place.agent, place.ending) = (None, Some(ending));
            }
        }
    }

    fn start_workers(&mut self, node: usize, id: AgentId, round: &Round) {
        let mut next = 0;
        for member in &round.members {
            if member.first_rank != next {
                self.violation = Some(format!("ranks have a gap or overlap: {round:?}"));
            }
            next += member.agent.slots;
        }
        if *self.rounds.entry(round.number).or_insert_with(|| round.clone()) != *round {
            self.violation = Some(format!("two different rounds {}", round.number));
        }
        let Some(place) = round.node_rank(id) else {
            self.violation = Some("started, but not a member".into());
            return;
        };
        if self.nodes[node].workers.is_some() {
            self.violation = Some("started over living workers".into());
        }
        self.agreed.remove(&id);
        let member = &round.members[place];
        let ranks = member.first_rank..member.first_rank + member.agent.slots;
        self.nodes[node].workers =
            Some(Workers { round: round.number, ranks, started: self.now, dies_at: None });
    }

    fn stop_workers(&mut self, node: usize, round: u64, grace: Grace) {
        let span = match grace {
            // Longer than a lease, as for workers that save a checkpoint.
            Grace::Full => self.dice.roll(0, 8000),
            Grace::Short => self.dice.roll(0, 2500),
            Grace::None => self.dice.roll(0, 900),
        };
        let at = self.now + span;
        let place = &mut self.nodes[node];
        match &mut place.workers {
            Some(workers) if workers.round == round => {
                workers.dies_at = Some(workers.dies_at.map_or(at, |earlier| earlier.min(at)));
            }
            _ => place.inbox.push(Event::WorkersStopped(round)),
        }
    }

    fn check(&mut self) -> Result<(), String> {
        let is_awake = |node: &&Node| !matches!(node.frozen, Some((Frozen::Node, _)));
        let rounds: BTreeSet<u64> = self
            .nodes
            .iter()
            .filter(is_awake)
            .filter_map(|node| Some(node.workers.as_ref()?.round))
            .collect();
        if rounds.len() > 1 {
            return Err(format!("rounds {rounds:?} run at once"));
        }
        self.violation.take().map_or(Ok(()), Err)
    }
}
