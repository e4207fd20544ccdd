//! A program on a virtual clock: when each computation runs.
//!
//! ```text
//!   rank 0   F0 F1 F2 F3 ·· ·· ·· ·· ·· B0 B0 …     a rank does one computation at a time, in the order of its row;
//!   rank 1   ·· F0 F1 F2 F3 ·· ·· ·· B0 B0 ·· …     it waits for a message where its tensor is used, never for a send
//! ```
//! A message is there one hop after its sender has come to the send. Times are numbers in any unit, the same for all. The time
//! from the beginning to the end of the last computation is the *makespan*; for the reasons why ranks are idle see `idle`.

use super::action::{Action, Compute, Message, Work};
use super::program::Program;
use super::stage_map::StageMap;
use super::verify::Verified;

/// How long the computations of a stage take for a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageTimes {
    /// The forward.
    pub forward: f64,
    /// The gradient of the input.
    pub input: f64,
    /// The gradients of the weights.
    pub weight: f64,
}

/// How long computations and messages take.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// Of stages 0, 1, ….
    pub stages: Vec<StageTimes>,
    /// From the send of a message until it is there.
    pub hop: f64,
}

/// A computation on the clock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What is computed.
    pub work: Work,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// When the last tensor that it waited for was sent by another rank; its start, if it waited for none.
    pub sent: f64,
}

/// When each computation of a program runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// The computations of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
    /// When the last one ends.
    pub makespan: f64,
}

impl StageTimes {
    /// How long a computation takes.
    pub fn of(&self, compute: Compute) -> f64 {
        match compute {
            Compute::Forward => self.forward,
            Compute::Backward => self.input + self.weight,
            Compute::Input => self.input,
            Compute::Weight => self.weight,
        }
    }
}

impl Times {
    /// Times of equal stages: `rank` is what a rank needs for all of its stages together.
    pub fn equal(rank: StageTimes, stages: &StageMap, hop: f64) -> Self {
        let each = stages.stages_each();
        let stage = |stage| {
            let shared = each[stages.rank_of(stage)] as f64;
            let StageTimes { forward, input, weight } = rank;
            StageTimes { forward: forward / shared, input: input / shared, weight: weight / shared }
        };
        Self { stages: (0..stages.num_stages()).map(stage).collect(), hop }
    }
}

impl Timeline {
    /// The time that a rank computes.
    pub fn busy(&self, rank: usize) -> f64 {
        self.ranks[rank].iter().map(|span| span.end - span.start).sum()
    }

    /// The part of all ranks' time that they are idle, from 0 to 1.
    pub fn idle_share(&self) -> f64 {
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.busy(rank)).sum();
        let all = self.makespan * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - busy / all } else { 0.0 }
    }
}

impl Verified<'_> {
    /// When each computation runs.
    ///
    /// # Panics
    ///
    /// If the program has more stages than times are given for.
    pub fn simulate(&self, times: &Times) -> Timeline {
        Clock::new(self.program(), times).run()
    }
}

/// The program while it is played: what ranks have done, and what they have sent.
struct Clock<'a> {
    program: &'a Program,
    times: &'a Times,
    next: Vec<usize>,
    now: Vec<f64>,
    spans: Vec<Vec<Span>>,
    /// When a message was sent, by direction, stage and micro-batch of the receiver; negative if it was not yet.
    sent: [Vec<f64>; 2],
    awake: Vec<usize>,
}

impl<'a> Clock<'a> {
    fn new(program: &'a Program, times: &'a Times) -> Self {
        let ranks = program.rows.len();
        let never = vec![-1.0; program.stages.num_stages() * program.num_micro_batches];
        Self {
            program,
            times,
            next: vec![0; ranks],
            now: vec![0.0; ranks],
            spans: vec![Vec::new(); ranks],
            sent: [never.clone(), never],
            awake: (0..ranks).rev().collect(),
        }
    }

    fn run(mut self) -> Timeline {
        while let Some(rank) = self.awake.pop() {
            while let Some(&action) = self.program.rows[rank].get(self.next[rank])
                && self.act(rank, action)
            {
                self.next[rank] += 1;
            }
        }
        let makespan = self.now.iter().copied().fold(0.0, f64::max);
        Timeline { ranks: self.spans, makespan }
    }

    fn sent(&mut self, at: Message) -> &mut f64 {
        &mut self.sent[at.way as usize][at.stage * self.program.num_micro_batches + at.micro_batch]
    }

    /// Does an action, if what it needs has been sent.
    fn act(&mut self, rank: usize, action: Action) -> bool {
        if let Action::Send(_) = action
            && let (Some(Action::Receive(at)), Some(peer)) =
                (action.mirrored(), self.program.peer_of(&action))
        {
            *self.sent(at) = self.now[rank];
            self.awake.push(peer);
        }
        let mut last: Option<f64> = None;
        for needed in action.works().filter_map(|work| self.program.needs(work)) {
            if self.program.peer_of(&Action::Receive(needed)) == Some(rank) {
                continue;
            }
            let sent = *self.sent(needed);
            if sent < 0.0 {
                return false;
            }
            last = Some(last.map_or(sent, |last| last.max(sent)));
        }
        let arrived = last.map_or(0.0, |sent| sent + self.times.hop);
        self.now[rank] = self.now[rank].max(arrived);
        for work in action.works() {
            let start = self.now[rank];
            let end = start + self.times.stages[work.stage].of(work.compute);
            self.now[rank] = end;
            self.spans[rank].push(Span {
                work,
                start,
                end,
                sent: last.map_or(start, |sent| sent.min(start)),
            });
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::tests_support::read;
    use super::super::verify;
    use super::*;

    #[test]
    fn a_rank_waits_where_a_tensor_is_used() {
        let stages = StageMap::Loop { ranks: 2, chunks: 1 };
        let rows = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0"].map(read).to_vec();
        let program = Program { stages, num_micro_batches: 1, rows };
        let stage = |forward| StageTimes { forward, input: 2.0, weight: 1.0 };
        let times = Times { stages: vec![stage(1.0), stage(1.5)], hop: 0.25 };
        let timeline = verify(&program).unwrap().simulate(&times);
        let spans = |rank: usize| -> Vec<_> {
            let spans = timeline.ranks[rank].iter();
            spans.map(|span| (span.work.to_string(), span.start, span.end, span.sent)).collect()
        };
        assert_eq!(spans(0), [("0F0".into(), 0.0, 1.0, 0.0), ("0B0".into(), 5.0, 8.0, 4.75)]);
        let expected = [("1F0", 1.25, 2.75, 1.0), ("1I0", 2.75, 4.75, 2.75), ("1W0", 4.75, 5.75, 4.75)];
        assert_eq!(spans(1), expected.map(|(work, start, end, sent)| (work.into(), start, end, sent)));
        assert_eq!((timeline.makespan, timeline.busy(0), timeline.busy(1)), (8.0, 4.0, 4.5));
        assert_eq!(timeline.idle_share(), 1.0 - 8.5 / 16.0);
    }
}
