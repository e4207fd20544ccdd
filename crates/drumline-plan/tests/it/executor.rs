//! A small executor of pipelines for tests: values travel as messages, and each stage mixes them.
//!
//! It knows nothing of the verifier. A program is right if all ranks reach their ends, nothing is left over, and each stage's weight
//! gradients come from the values that one rank alone would compute.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use drumline_plan::pipeline::{Action, Compute, Message, MessageRule, Program, Way, Work};

/// Why a program is not right.
pub(super) type Failed = &'static str;

/// What a rank holds: what it is for, the stage, the micro-batch.
type Item = (&'static str, usize, usize);

struct Executor<'a> {
    program: &'a Program,
    rule: MessageRule,
    trains: bool,
    next: Vec<usize>,
    items: BTreeMap<Item, u64>,
    forwards: BTreeSet<(usize, usize)>,
    gradients: BTreeMap<usize, BTreeSet<u64>>,
    reduced: BTreeSet<usize>,
    divided: BTreeSet<usize>,
    gathered: BTreeSet<usize>,
    mail: BTreeMap<(usize, Message), u64>,
    /// What a rank has listed for a peer and has not passed.
    posted: BTreeMap<(usize, usize), VecDeque<(Action, u64)>>,
}

fn mix(value: u64, letter: char, stage: usize, micro_batch: usize) -> u64 {
    let words = [u64::from(letter), stage as u64, micro_batch as u64];
    words
        .into_iter()
        .fold(value, |value, word| (value ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Carries a program out.
pub(super) fn execute(program: &Program, rule: MessageRule) -> Result<(), Failed> {
    let works = || program.rows.iter().flatten().flat_map(|action| action.works());
    let sharding = program.rows.iter().flatten().filter_map(|action| match *action {
        Action::Unshard(stage) | Action::Reshard(stage) => Some(stage),
        _ => None,
    });
    let mut executor = Executor {
        program,
        rule,
        trains: works().any(|work| work.compute != Compute::Forward),
        next: vec![0; program.rows.len()],
        items: BTreeMap::new(),
        forwards: BTreeSet::new(),
        gradients: BTreeMap::new(),
        reduced: BTreeSet::new(),
        divided: sharding.collect(),
        gathered: BTreeSet::new(),
        mail: BTreeMap::new(),
        posted: BTreeMap::new(),
    };
    let mut is_moving = true;
    while is_moving {
        is_moving = false;
        for rank in 0..program.rows.len() {
            while executor.step(rank)? {
                is_moving = true;
            }
        }
    }
    executor.end()
}

impl Executor<'_> {
    fn here(&self, rank: usize, stage: usize) -> bool {
        self.program.stages.rank_of(stage) == rank
    }

    fn last(&self) -> usize {
        self.program.stages.num_stages() - 1
    }

    /// Does a rank's next action; false if it waits or has none.
    fn step(&mut self, rank: usize) -> Result<bool, Failed> {
        let Some(&action) = self.program.rows[rank].get(self.next[rank]) else { return Ok(false) };
        for (stage, micro_batch) in action.parts() {
            if stage > self.last() || micro_batch.unwrap_or(0) >= self.program.num_micro_batches {
                return Err("outside");
            }
            if !self.here(rank, stage) {
                return Err("on another rank");
            }
        }
        let done = match action {
            Action::Compute(_) | Action::Overlap(..) => self.compute(rank, action)?,
            Action::Send(message) => self.send(rank, action, message)?,
            Action::Receive(message) => self.receive(rank, action, message)?,
            Action::Unshard(stage) => self.gathered.insert(stage).then_some(true).ok_or("gathered twice")?,
            Action::Reshard(stage) => self.gathered.remove(&stage).then_some(true).ok_or("not gathered")?,
            Action::ReduceGrad(stage) => {
                let complete =
                    self.gradients.get(&stage).map_or(0, BTreeSet::len) == self.program.num_micro_batches;
                (complete && self.reduced.insert(stage)).then_some(true).ok_or("reduced early or twice")?
            }
        };
        self.next[rank] += usize::from(done);
        Ok(done)
    }

    fn put(&mut self, item: Item, value: u64) -> Result<(), Failed> {
        if self.items.insert(item, value).is_some() { Err("made twice") } else { Ok(()) }
    }

    fn take(&mut self, item: Item) -> Result<u64, Failed> {
        self.items.remove(&item).ok_or("missing")
    }

    /// Computations that overlap take what both need before either makes anything.
    fn compute(&mut self, rank: usize, action: Action) -> Result<bool, Failed> {
        let works: Vec<Work> = action.works().collect();
        if works.iter().any(|work| self.divided.contains(&work.stage) && !self.gathered.contains(&work.stage))
        {
            return Err("parameters are not there");
        }
        if works.iter().any(|work| self.waits(rank, *work)) {
            return Ok(false);
        }
        let values = works.iter().map(|work| self.takes(*work)).collect::<Result<Vec<_>, _>>()?;
        for (work, value) in works.into_iter().zip(values) {
            self.makes(rank, work, value)?;
        }
        Ok(true)
    }

    /// Whether a computation waits for a message that is on its way.
    fn waits(&self, rank: usize, Work { compute, stage, micro_batch }: Work) -> bool {
        let from = match compute {
            Compute::Forward if stage > 0 => Some(("in", stage - 1)),
            Compute::Backward | Compute::Input if stage < self.last() => Some(("gradient in", stage + 1)),
            _ => None,
        };
        from.is_some_and(|(name, sender)| {
            self.rule == MessageRule::Fifo
                && !self.here(rank, sender)
                && !self.items.contains_key(&(name, stage, micro_batch))
        })
    }

    /// Takes what a computation needs, and computes.
    fn takes(&mut self, Work { compute, stage, micro_batch }: Work) -> Result<u64, Failed> {
        match compute {
            Compute::Forward => {
                let input = if stage > 0 {
                    self.take(("in", stage, micro_batch))?
                } else {
                    mix(1, 'x', 0, micro_batch)
                };
                let is_first = self.forwards.insert((stage, micro_batch));
                is_first.then_some(mix(input, 'F', stage, micro_batch)).ok_or("forward twice")
            }
            Compute::Backward | Compute::Input => {
                let saved = self.take(("saved", stage, micro_batch))?;
                let is_last = stage == self.last();
                let gradient = if is_last { saved } else { self.take(("gradient in", stage, micro_batch))? };
                Ok(mix(saved ^ gradient.rotate_left(7), 'B', stage, micro_batch))
            }
            Compute::Weight => self.take(("weights", stage, micro_batch)),
        }
    }

    /// Leaves what a computation has made.
    fn makes(&mut self, rank: usize, work: Work, value: u64) -> Result<(), Failed> {
        let Work { compute, stage, micro_batch } = work;
        match compute {
            Compute::Forward if self.trains => self.put(("saved", stage, micro_batch), value)?,
            Compute::Forward => {}
            Compute::Input => self.put(("weights", stage, micro_batch), value)?,
            Compute::Backward | Compute::Weight => self.add(stage, value)?,
        }
        let given = match compute {
            Compute::Forward if stage < self.last() => Some(("in", "out", stage + 1)),
            Compute::Backward | Compute::Input if stage > 0 => {
                Some(("gradient in", "gradient out", stage - 1))
            }
            _ => None,
        };
        match given {
            Some((name, _, to)) if self.here(rank, to) => self.put((name, to, micro_batch), value),
            Some((_, name, _)) => self.put((name, stage, micro_batch), value),
            None => Ok(()),
        }
    }

    fn add(&mut self, stage: usize, value: u64) -> Result<(), Failed> {
        let is_late = self.reduced.contains(&stage);
        if !is_late && self.gradients.entry(stage).or_default().insert(value) {
            Ok(())
        } else {
            Err("late or twice")
        }
    }

    fn peer(&self, rank: usize, action: Action) -> Result<(usize, Action), Failed> {
        let peer = self.program.peer_of(&action).zip(action.mirrored());
        peer.filter(|(peer, _)| *peer != rank).ok_or("no peer")
    }

    fn outgoing(&mut self, message: Message) -> Result<u64, Failed> {
        let name = if message.way == Way::Forward { "out" } else { "gradient out" };
        self.take((name, message.stage, message.micro_batch))
    }

    fn incoming(&mut self, message: Message, value: u64) -> Result<(), Failed> {
        let name = if message.way == Way::Forward { "in" } else { "gradient in" };
        self.put((name, message.stage, message.micro_batch), value)
    }

    fn send(&mut self, rank: usize, action: Action, message: Message) -> Result<bool, Failed> {
        let (peer, mirrored) = self.peer(rank, action)?;
        match self.rule {
            MessageRule::Mailbox => {
                let value = self.outgoing(message)?;
                if self.mail.insert((peer, message), value).is_some() {
                    return Err("sent twice");
                }
            }
            MessageRule::Rendezvous => {
                // Whoever comes second finds the other one; here always the sender, which looks again and again.
                if self.program.rows[peer].get(self.next[peer]) != Some(&mirrored) {
                    return Ok(false);
                }
                let value = self.outgoing(message)?;
                let Action::Receive(at) = mirrored else { return Err("a send is mirrored by a receive") };
                self.incoming(at, value)?;
                self.next[peer] += 1;
            }
            MessageRule::Fifo => {
                let value = self.outgoing(message)?;
                self.post(rank, peer, action, value)?;
            }
        }
        Ok(true)
    }

    fn receive(&mut self, rank: usize, action: Action, message: Message) -> Result<bool, Failed> {
        let (peer, _) = self.peer(rank, action)?;
        match self.rule {
            MessageRule::Mailbox => {
                let sent = action.sent().ok_or("no peer")?;
                let Some(value) = self.mail.remove(&(rank, sent)) else { return Ok(false) };
                self.incoming(message, value)?;
                Ok(true)
            }
            // The sender takes both steps.
            MessageRule::Rendezvous => Ok(false),
            MessageRule::Fifo => self.post(rank, peer, action, 0).map(|()| true),
        }
    }

    fn post(&mut self, rank: usize, peer: usize, action: Action, value: u64) -> Result<(), Failed> {
        self.posted.entry((rank, peer)).or_default().push_back((action, value));
        loop {
            let front = |key| self.posted.get(&key).and_then(|queue| queue.front().copied());
            let (Some((ours, mine)), Some((theirs, its))) = (front((rank, peer)), front((peer, rank))) else {
                return Ok(());
            };
            if ours.mirrored() != Some(theirs) {
                return Ok(());
            }
            for key in [(rank, peer), (peer, rank)] {
                self.posted.entry(key).or_default().pop_front();
            }
            match (ours, theirs) {
                (Action::Receive(at), _) => self.incoming(at, its)?,
                (_, Action::Receive(at)) => self.incoming(at, mine)?,
                _ => return Err("two sends"),
            }
        }
    }

    fn end(&self) -> Result<(), Failed> {
        let program = self.program;
        if (0..program.rows.len()).any(|rank| self.next[rank] < program.rows[rank].len()) {
            return Err("stopped");
        }
        let is_waiting = self.posted.values().any(|queue| !queue.is_empty());
        if is_waiting || !self.mail.is_empty() || !self.items.is_empty() || !self.gathered.is_empty() {
            return Err("left over");
        }
        let [stages, micro_batches] = [program.stages.num_stages(), program.num_micro_batches];
        if self.forwards.len() != stages * micro_batches {
            return Err("not all forwards");
        }
        if !self.reduced.is_empty() && self.reduced.len() != stages {
            return Err("not all reduced");
        }
        let complete =
            |stage: usize| self.gradients.get(&stage) == Some(&alone(stages, micro_batches)[stage]);
        if self.trains && !(0..stages).all(complete) { Err("other gradients") } else { Ok(()) }
    }
}

/// The gradients of all stages, as one rank alone computes them.
fn alone(stages: usize, micro_batches: usize) -> Vec<BTreeSet<u64>> {
    let mut gradients = vec![BTreeSet::new(); stages];
    for micro_batch in 0..micro_batches {
        let mut saved = Vec::new();
        let mut value = mix(1, 'x', 0, micro_batch);
        for stage in 0..stages {
            value = mix(value, 'F', stage, micro_batch);
            saved.push(value);
        }
        for stage in (0..stages).rev() {
            value = mix(saved[stage] ^ value.rotate_left(7), 'B', stage, micro_batch);
            gradients[stage].insert(value);
        }
    }
    gradients
}
