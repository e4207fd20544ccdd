//! The list scheduler: each rank, whenever it is free, takes the best of what it could do.
//!
//! Gradients of inputs come first, because other ranks wait for them; then forwards, while there is memory; weight gradients fill
//! the time in which nothing else can be done, or make room. How many forwards a rank does before its first backward, and how long
//! it waits for something better before it fills the time, is the policy; several are tried.

use super::super::action::{Action, Compute, Message, Way, Work};
use super::super::program::Program;
use super::Search;

/// How a rank decides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    /// Micro-batches of a stage that a rank has begun and not finished, at most, more than later ranks by one for each rank.
    extra: usize,
    /// A rank waits for a message that comes within this part of the time of a weight gradient.
    patience: f64,
    /// Whether forwards come before gradients of inputs.
    forwards_first: bool,
}

impl Policy {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let both =
            |extra, patience| [true, false].map(|forwards_first| Self { extra, patience, forwards_first });
        (0..4).flat_map(move |extra| {
            [0.0, 0.5, 1.0].into_iter().flat_map(move |patience| both(extra, patience))
        })
    }
}

/// The ranks while their rows are written.
struct Board<'a> {
    search: &'a Search,
    program: Program,
    policy: Policy,
    now: Vec<f64>,
    bytes: Vec<u64>,
    /// Per stage: micro-batches that have had their forward, the gradient of their input, and their weight gradients.
    done: Vec<[usize; 3]>,
    /// When a stage has what it needs, by direction, stage and micro-batch; infinite until it is known.
    ready: [Vec<f64>; 2],
}

/// The computations of all ranks; `None` if they block each other for lack of memory.
pub(super) fn rows(search: &Search, policy: Policy) -> Option<Vec<Vec<Action>>> {
    let ranks = search.stages.num_ranks();
    let stages = search.stages.num_stages();
    let never = vec![f64::INFINITY; stages * search.num_micro_batches];
    let state = |rank| search.stages.stages_of(rank).into_iter().map(|stage| search.bytes[stage].state).sum();
    let program = Program {
        stages: search.stages.clone(),
        num_micro_batches: search.num_micro_batches,
        rows: vec![Vec::new(); ranks],
    };
    let mut board = Board {
        search,
        program,
        policy,
        now: vec![0.0; ranks],
        bytes: (0..ranks).map(state).collect(),
        done: vec![[0; 3]; stages],
        ready: [never.clone(), never],
    };
    for _ in 0..3 * stages * search.num_micro_batches {
        let best = (0..ranks).filter_map(|rank| board.best(rank)).min_by(|a, b| a.1.total_cmp(&b.1));
        let (work, start) = best?;
        board.take(work, start);
    }
    Some(board.program.rows)
}

impl Board<'_> {
    /// What a rank does next, and when it begins.
    fn best(&self, rank: usize) -> Option<(Work, f64)> {
        let stages = self.search.stages.stages_of(rank);
        let options = |compute| {
            let options = stages.iter().filter_map(move |stage| self.option(rank, compute, *stage));
            options.min_by(|a, b| a.1.total_cmp(&b.1))
        };
        let [forward, input, weight] = [Compute::Forward, Compute::Input, Compute::Weight].map(options);
        let (first, second) = if self.policy.forwards_first { (forward, input) } else { (input, forward) };
        let urgent = match (first, second) {
            (Some(first), Some(second)) if second.1 < first.1 => Some(second),
            (first, second) => first.or(second),
        };
        let Some((weight, start)) = weight else { return urgent };
        let worth = self.policy.patience * self.search.times.stages[weight.stage].weight;
        urgent.filter(|urgent| urgent.1 <= start + worth).or(Some((weight, start)))
    }

    /// The next computation of a kind and a stage, and when it can begin; `None` if it cannot yet be said, or has no memory.
    fn option(&self, rank: usize, compute: Compute, stage: usize) -> Option<(Work, f64)> {
        let [forwards, inputs, weights] = self.done[stage];
        let (micro_batch, before) = match compute {
            Compute::Forward => (forwards, self.search.num_micro_batches),
            Compute::Input => (inputs, forwards),
            _ => (weights, inputs),
        };
        if micro_batch >= before {
            return None;
        }
        let work = Work { compute, stage, micro_batch };
        if compute == Compute::Forward {
            let left = self.search.stages.num_ranks() - rank + self.policy.extra;
            let chunks = self.search.stages.stages_of(rank).len();
            let begun: usize =
                self.search.stages.stages_of(rank).iter().map(|s| self.done[*s][0] - self.done[*s][1]).sum();
            if begun >= left * chunks || self.after(rank, work) > self.search.limit {
                return None;
            }
        }
        let ready = self.program.needs(work).map_or(0.0, |at| self.ready[at.way as usize][self.slot(at)]);
        ready.is_finite().then(|| (work, self.now[rank].max(ready)))
    }

    fn slot(&self, at: Message) -> usize {
        at.stage * self.search.num_micro_batches + at.micro_batch
    }

    /// The most that a rank needs during a forward: its output is sent at once, but is there.
    fn after(&self, rank: usize, work: Work) -> u64 {
        let output = self.search.bytes.get(work.stage + 1).map_or(0, |next| next.input);
        self.bytes[rank] + self.search.bytes[work.stage].activations + 2 * output
    }

    fn take(&mut self, work: Work, start: f64) {
        let rank = self.search.stages.rank_of(work.stage);
        let bytes = &self.search.bytes[work.stage];
        let end = start + self.search.times.stages[work.stage].of(work.compute);
        self.now[rank] = end;
        self.program.rows[rank].push(Action::Compute(work));
        let kind = match work.compute {
            Compute::Forward => {
                self.bytes[rank] += bytes.activations;
                0
            }
            Compute::Weight => {
                self.bytes[rank] -= bytes.weight_inputs;
                2
            }
            _ => {
                self.bytes[rank] = self.bytes[rank] + bytes.weight_inputs - bytes.activations;
                1
            }
        };
        self.done[work.stage][kind] += 1;
        if let Some(to) = self.program.gives(work) {
            let hop = if self.search.stages.rank_of(to.stage) == rank { 0.0 } else { self.search.times.hop };
            let slot = self.slot(to);
            self.ready[usize::from(to.way == Way::Backward)][slot] = end + hop;
        }
    }
}
