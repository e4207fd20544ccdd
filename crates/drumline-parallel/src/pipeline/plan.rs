//! What a pipeline carries out: a verified program, with the receive buffers of each rank.

use drumline_plan::pipeline::{
    Action, PipelineSize, Program, Schedule, ScheduleError, Span, StageBytes, StageMap, StageTimes, Times,
    lower, verify,
};

use super::error::PipelineError;

/// Where programs come from.
#[derive(Debug, Clone)]
pub enum Order {
    /// A schedule, for any number of micro-batches.
    Schedule {
        /// Which one.
        schedule: Schedule,
        /// The stages of each rank; [`Schedule::default_chunks`] is usual.
        chunks: usize,
    },
    /// A program, for its own number of micro-batches: one that was searched for, or read from a file of PyTorch.
    Program(Program),
}

impl Default for Order {
    fn default() -> Self {
        Schedule::OneFOneB.into()
    }
}

impl From<Schedule> for Order {
    fn from(schedule: Schedule) -> Self {
        Self::Schedule { schedule, chunks: schedule.default_chunks() }
    }
}

impl Order {
    /// Which rank holds which stage, with this many ranks.
    pub(crate) fn stages(&self, ranks: usize) -> StageMap {
        match self {
            Self::Schedule { schedule, chunks } => {
                schedule.stage_map(PipelineSize { ranks, chunks: *chunks, micro_batches: 1 })
            }
            Self::Program(program) => program.stages.clone(),
        }
    }

    /// The same order for a step of another number of micro-batches, such as the last of an epoch. If the schedule takes only
    /// multiples, the stages are run breadth first.
    pub(crate) fn for_rest(&self, ranks: usize, micro_batches: usize) -> Self {
        let Self::Schedule { schedule, chunks } = *self else { return self.clone() };
        let size = PipelineSize { ranks, chunks, micro_batches };
        match schedule.program(size) {
            Err(ScheduleError::Rounds { .. }) => Self::Schedule { schedule: Schedule::BreadthFirst, chunks },
            _ => self.clone(),
        }
    }

    /// The verified program of a step.
    pub fn plan(&self, ranks: usize, micro_batches: usize) -> Result<Plan, PipelineError> {
        match self {
            Self::Schedule { schedule, chunks } => {
                let size = PipelineSize { ranks, chunks: *chunks, micro_batches };
                Plan::new(schedule.program(size)?)
            }
            Self::Program(program) if program.num_micro_batches != micro_batches => {
                Err(PipelineError::MicroBatches { program: program.num_micro_batches, step: micro_batches })
            }
            Self::Program(program) => Plan::new(program.clone()),
        }
    }
}

/// A program that is proved to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    program: Program,
    receive_buffers: Vec<usize>,
    activations: Vec<usize>,
}

impl Plan {
    /// Verifies a program.
    pub fn new(program: Program) -> Result<Self, PipelineError> {
        let verified = verify(&program)?;
        let peaks = verified.peaks(&vec![StageBytes::default(); program.stages.num_stages()]);
        let (receive_buffers, activations) =
            peaks.iter().map(|peak| (peak.received, peak.activations)).unzip();
        Ok(Self { program, receive_buffers, activations })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// How many received tensors a rank has at most at a time.
    pub fn receive_buffers(&self, rank: usize) -> usize {
        self.receive_buffers[rank]
    }

    /// How many activations a rank has at most at a time; one is of a stage and a micro-batch.
    pub fn activations(&self, rank: usize) -> usize {
        self.activations[rank]
    }

    /// The part of a step in which ranks wait, if all stages take the same time and backward takes twice that of forward.
    pub fn idle_share(&self) -> f64 {
        let unit = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        let times = Times::equal(unit, &self.program.stages, 0.0);
        verify(&self.program).map_or(0.0, |verified| verified.simulate(&times).idle_share())
    }

    /// The same without backward.
    pub fn forward_only(&self) -> Result<Self, PipelineError> {
        Self::new(self.program.forward_only())
    }

    /// The same for one rank that holds all stages: its row has the computations of all ranks, in the order in which they
    /// would begin.
    pub fn on_one_rank(&self) -> Result<Self, PipelineError> {
        let unit = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
        let times = Times::equal(unit, &self.program.stages, 0.0);
        let mut spans: Vec<Span> =
            verify(&self.program)?.simulate(&times).ranks.into_iter().flatten().collect();
        // Stable: computations that begin together stay in the order of ranks, none of which waits for another.
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        let row = spans.into_iter().map(|span| Action::Compute(span.work)).collect();
        let stages = StageMap::Loop { ranks: 1, chunks: self.program.stages.num_stages() };
        let folded = Program { stages, num_micro_batches: self.program.num_micro_batches, rows: vec![row] };
        Self::new(lower(&folded)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_can_do_what_several_would() {
        for schedule in Schedule::ALL {
            for (ranks, micro_batches) in [(1, 1), (2, 4), (3, 6), (4, 8)] {
                let plan = Order::from(schedule).plan(ranks, micro_batches).unwrap();
                let folded = plan.on_one_rank().unwrap();
                let works = |plan: &Plan| {
                    let mut works: Vec<_> =
                        plan.program().rows.iter().flatten().flat_map(|action| action.works()).collect();
                    works.sort();
                    works
                };
                assert_eq!(works(&plan), works(&folded), "{schedule} {ranks} {micro_batches}");
                assert_eq!(folded.receive_buffers(0), 0);
                assert!(folded.forward_only().unwrap().program().is_forward_only());
            }
        }
    }

    #[test]
    fn the_rest_of_an_epoch_has_a_program() {
        for schedule in Schedule::ALL {
            for (ranks, chunks) in [(2, schedule.default_chunks()), (3, schedule.default_chunks())] {
                let order = Order::Schedule { schedule, chunks };
                for micro_batches in 1..12 {
                    let rest = order.for_rest(ranks, micro_batches);
                    let plan = rest.plan(ranks, micro_batches).unwrap();
                    assert_eq!(plan.program().stages, order.stages(ranks), "{schedule} {micro_batches}");
                }
            }
        }
        let order = Order::from(Schedule::Interleaved);
        assert!(order.plan(2, 5).is_err(), "the control");
    }

    #[test]
    fn a_program_has_its_own_number_of_micro_batches() {
        let plan = Order::from(Schedule::GPipe).plan(2, 3).unwrap();
        let order = Order::Program(plan.program().clone());
        assert_eq!(order.plan(2, 3).unwrap(), plan);
        let error = order.plan(2, 4).unwrap_err().to_string();
        assert!(error.starts_with("the program is for 3 micro-batches, and the step has 4"), "{error}");
        assert_eq!(order.stages(9), StageMap::Loop { ranks: 2, chunks: 1 });
    }
}
