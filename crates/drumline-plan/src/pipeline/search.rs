//! A schedule for measured times: shorter than the named ones where stages are uneven, in the memory that there is.
//!
//! ```text
//!   named schedules that fit ─┐
//!   list scheduler (`list`) ──┼─▶ the shortest of them ─▶ local search (`improve`) ─▶ verified program
//!   one micro-batch at a time ┘      each verified               each step verified
//! ```
//! Named schedules are made for stages that take equally long. With a vocabulary of 50,000 words the last stage takes longer and
//! keeps more; the search moves forwards, input gradients and weight gradients to where they fit. It draws random numbers from its
//! seed only, so that all ranks find the same program, or one finds it and the others read it as a file.

mod improve;
mod list;

use super::action::{Action, Compute};
use super::lower::lower;
use super::memory::{RankPeak, StageBytes};
use super::program::Program;
use super::schedule::{PipelineSize, Schedule};
use super::simulate::Times;
use super::stage_map::StageMap;
use super::verify::verify;

/// What is searched for.
#[derive(Debug, Clone, PartialEq)]
pub struct Search {
    /// Which rank holds which stage.
    pub stages: StageMap,
    /// Micro-batches of a step.
    pub num_micro_batches: usize,
    /// How long computations and messages take.
    pub times: Times,
    /// The memory of stages 0, 1, ….
    pub bytes: Vec<StageBytes>,
    /// The memory of a rank.
    pub limit: u64,
    /// Where random numbers begin.
    pub seed: u64,
    /// As many changes are tried.
    pub changes: usize,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The program; it is verified.
    pub program: Program,
    /// How long a step takes.
    pub makespan: f64,
    /// The memory of each rank.
    pub peaks: Vec<RankPeak>,
    /// The best named schedule that fits, and its makespan.
    pub best_named: Option<(Schedule, f64)>,
}

/// No program fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "rank {rank} needs {needed} bytes for one micro-batch at a time, and has {limit}; try smaller micro-batches, more ranks, or \
     recomputed activations"
)]
pub struct DoesNotFit {
    /// The rank.
    pub rank: usize,
    /// What it needs at least.
    pub needed: u64,
    /// What it has.
    pub limit: u64,
}

/// A program with its value: the lower, the better.
#[derive(Debug, Clone)]
struct Candidate {
    program: Program,
    makespan: f64,
    /// When ranks end, all together: of two equal makespans, the one with ranks that end earlier has more room for changes.
    ends: f64,
    peaks: Vec<RankPeak>,
}

/// A splitmix64.
struct Random(u64);

impl Search {
    /// Searches.
    ///
    /// # Panics
    ///
    /// If times or bytes are given for fewer stages than there are.
    pub fn run(&self) -> Result<Found, DoesNotFit> {
        let serial = self.serial();
        let named: Vec<_> = Schedule::ALL.into_iter().filter_map(|schedule| self.named(schedule)).collect();
        let listed = list::Policy::all().filter_map(|policy| self.candidate(list::rows(self, policy)?));
        let starts =
            named.iter().map(|(_, candidate)| candidate.clone()).chain(listed).chain(serial.clone().ok());
        let Some(start) = starts.reduce(|best, next| if next.is_better(&best) { next } else { best }) else {
            return Err(serial.err().unwrap_or(DoesNotFit { rank: 0, needed: 0, limit: self.limit }));
        };
        let best_named = named.into_iter().map(|(schedule, candidate)| (schedule, candidate.makespan));
        let best_named = best_named.reduce(|best, next| if next.1 < best.1 { next } else { best });
        let Candidate { program, makespan, peaks, .. } = improve::improve(self, start);
        Ok(Found { program, makespan, peaks, best_named })
    }

    /// The program of these computations, if it can be carried out in the memory that there is.
    fn candidate(&self, rows: Vec<Vec<Action>>) -> Option<Candidate> {
        let computed =
            Program { stages: self.stages.clone(), num_micro_batches: self.num_micro_batches, rows };
        let program = lower(&computed).ok()?;
        let verified = verify(&program).ok()?;
        let peaks = verified.peaks(&self.bytes);
        if peaks.iter().any(|peak| peak.bytes > self.limit) {
            return None;
        }
        let timeline = verified.simulate(&self.times);
        let end = |spans: &Vec<super::simulate::Span>| spans.last().map_or(0.0, |span| span.end);
        let ends = timeline.ranks.iter().map(end).sum();
        Some(Candidate { makespan: timeline.makespan, ends, peaks, program })
    }

    /// A named schedule, if it has these stages and fits.
    fn named(&self, schedule: Schedule) -> Option<(Schedule, Candidate)> {
        let size = PipelineSize {
            ranks: self.stages.num_ranks(),
            chunks: self.stages.chunks(),
            micro_batches: self.num_micro_batches,
        };
        let program = schedule.program(size).ok().filter(|program| program.stages == self.stages)?;
        Some((schedule, self.candidate(program.rows)?))
    }

    /// One micro-batch after the other: what needs the least memory.
    fn serial(&self) -> Result<Candidate, DoesNotFit> {
        let row = |rank: usize| {
            let stages = self.stages.stages_of(rank);
            let of_one = |micro_batch: usize| {
                let of = move |compute| move |stage: &usize| Action::compute(compute, *stage, micro_batch);
                let forwards: Vec<_> = stages.iter().map(of(Compute::Forward)).collect();
                forwards.into_iter().chain(stages.iter().rev().map(of(Compute::Backward)).collect::<Vec<_>>())
            };
            (0..self.num_micro_batches).flat_map(of_one).collect()
        };
        let rows: Vec<_> = (0..self.stages.num_ranks()).map(row).collect();
        let unlimited = Self { limit: u64::MAX, ..self.clone() };
        let whole = unlimited.candidate(rows).expect("one micro-batch after the other can be carried out");
        match whole.peaks.iter().position(|peak| peak.bytes > self.limit) {
            Some(rank) => Err(DoesNotFit { rank, needed: whole.peaks[rank].bytes, limit: self.limit }),
            None => Ok(whole),
        }
    }
}

impl Candidate {
    fn is_better(&self, other: &Self) -> bool {
        (self.makespan, self.ends) < (other.makespan, other.ends)
    }
}

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit.max(1) as u64) as usize
    }
}
