//! Why ranks of a pipeline are idle.
//!
//! | cause | the rank has nothing to do because |
//! |---|---|
//! | hop | the tensor that it needs is on its way |
//! | weight | its row computes weight gradients later that it could compute now |
//! | drain | the pipeline empties: it has done its last forward |
//! | warm-up | the pipeline fills: it has not done its first backward |
//! | imbalance | another rank is slower |
//!
//! Where several fit, the first one in this table counts.

use std::fmt;

use super::action::Compute;
use super::simulate::Timeline;

/// Why a rank is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdleCause {
    /// A message is on its way.
    Hop,
    /// Weight gradients could be computed.
    Weight,
    /// The pipeline empties.
    Drain,
    /// The pipeline fills.
    WarmUp,
    /// Another rank is slower.
    Imbalance,
}

/// How long a rank is idle, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Idle([f64; IdleCause::ALL.len()]);

impl IdleCause {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Hop, Self::Weight, Self::Drain, Self::WarmUp, Self::Imbalance];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hop => "hop",
            Self::Weight => "weight",
            Self::Drain => "drain",
            Self::WarmUp => "warm-up",
            Self::Imbalance => "imbalance",
        }
    }
}

impl Idle {
    /// The time for a cause.
    pub fn of(&self, cause: IdleCause) -> f64 {
        self.0[cause as usize]
    }

    /// The time for all of them.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    fn add(&mut self, cause: IdleCause, time: f64) {
        self.0[cause as usize] += time;
    }
}

impl Timeline {
    /// How long a rank is idle, and why.
    pub fn idle(&self, rank: usize) -> Idle {
        let spans = &self.ranks[rank];
        let first_backward = spans.iter().position(|span| is_backward(span.work.compute));
        let last_forward = spans.iter().rposition(|span| span.work.compute == Compute::Forward);
        let mut idle = Idle::default();
        let mut free = 0.0_f64;
        let mut left_weights = 0_usize;
        for (number, span) in spans.iter().enumerate() {
            let sent = span.sent.max(free);
            let cause = if left_weights > 0 {
                IdleCause::Weight
            } else if last_forward.is_none_or(|last| last < number) {
                IdleCause::Drain
            } else if first_backward.is_none_or(|first| first >= number) {
                IdleCause::WarmUp
            } else {
                IdleCause::Imbalance
            };
            idle.add(cause, sent - free);
            idle.add(IdleCause::Hop, span.start - sent);
            left_weights += usize::from(span.work.compute == Compute::Input);
            left_weights -= usize::from(span.work.compute == Compute::Weight);
            free = span.end;
        }
        idle.add(IdleCause::Drain, self.makespan - free);
        idle
    }
}

fn is_backward(compute: Compute) -> bool {
    matches!(compute, Compute::Backward | Compute::Input)
}

impl fmt::Display for IdleCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PipelineSize, Schedule, StageMap, StageTimes, Times, verify};
    use super::*;

    const UNIT: StageTimes = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };

    /// Unit times of ranks whose stages are equal.
    fn times(size: PipelineSize, hop: f64) -> Times {
        let stages = StageMap::Loop { ranks: size.ranks, chunks: size.chunks };
        Times::equal(UNIT, &stages, hop)
    }

    fn timeline(schedule: Schedule, size: PipelineSize, times: &Times) -> Timeline {
        verify(&schedule.program(size).unwrap()).unwrap().simulate(times)
    }

    #[test]
    fn gpipe_fills_and_drains() {
        let size = PipelineSize { ranks: 4, chunks: 1, micro_batches: 8 };
        let timeline = timeline(Schedule::GPipe, size, &times(size, 0.0));
        for rank in 0..4 {
            let idle = timeline.idle(rank);
            let fill = rank as f64;
            assert_eq!((idle.of(IdleCause::WarmUp), idle.of(IdleCause::Drain)), (fill, 9.0 - fill));
            assert_eq!(idle.total(), 9.0);
        }
    }

    #[test]
    fn each_cause_occurs_where_it_is_made() {
        let size = PipelineSize { ranks: 2, chunks: 1, micro_batches: 4 };
        let even = times(size, 0.0);
        let of = |schedule, times: &Times, rank, cause| timeline(schedule, size, times).idle(rank).of(cause);
        assert_eq!(of(Schedule::OneFOneB, &even, 0, IdleCause::Hop), 0.0, "control");
        assert_eq!(of(Schedule::OneFOneB, &even, 0, IdleCause::Imbalance), 0.0, "control");
        let far = Times { hop: 0.5, ..even.clone() };
        assert!(of(Schedule::OneFOneB, &far, 0, IdleCause::Hop) > 0.0);
        let mut uneven = even.clone();
        uneven.stages[1].forward = 2.0;
        assert!(of(Schedule::OneFOneB, &uneven, 0, IdleCause::Imbalance) > 0.0);
        // Rank 1 keeps its weight gradients for the end, and has nothing else to do while it waits for slow forwards.
        let mut slow = even.clone();
        slow.stages[0].forward = 4.0;
        assert!(of(Schedule::ZeroBubble1P, &slow, 1, IdleCause::Weight) > 0.0);
        assert_eq!(of(Schedule::OneFOneB, &slow, 1, IdleCause::Weight), 0.0, "control: no halves");
    }

    #[test]
    fn causes_add_up_to_what_is_not_busy() {
        for schedule in Schedule::ALL {
            let size = PipelineSize { ranks: 4, chunks: schedule.default_chunks(), micro_batches: 8 };
            let mut times = times(size, 0.125);
            times.stages[1].input = 1.75;
            let timeline = timeline(schedule, size, &times);
            for rank in 0..4 {
                let idle = timeline.idle(rank);
                assert!((idle.total() + timeline.busy(rank) - timeline.makespan).abs() < 1e-9, "{schedule}");
                assert!(IdleCause::ALL.iter().all(|cause| idle.of(*cause) >= 0.0), "{schedule}");
            }
        }
    }
}
