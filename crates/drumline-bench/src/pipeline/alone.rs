//! How long the stages of a rank compute when they wait for nobody: what the simulator is given.
//!
//! Each stage is built a second time, as a model of its own, and does the micro-batches of a step one after the other. All
//! ranks do this at the same time, since cores that compute at the same time slow each other down.

use anyhow::Context;
use drumline::comm::{Axis, Mesh};
use drumline::engine::pipeline::{LayerError, MicroBatch, Order, Pipeline, PipelineOptions, Plan, Scale};
use drumline::engine::{Agreed, Brought};
use drumline::optim::{Optimizer, Sgd, SgdOptions};
use drumline::{ProcessGroup, ReduceOp};
use drumline_plan::pipeline::{Action, Compute, Program, StageMap, StageTimes, Work};
use drumline_zoo::formula::fill_part;
use tch::{Kind, Tensor};

use super::PipelineArgs;
use super::model::{hidden_states, layers, loss, micro_batches, names};

/// The stages of a rank, each as a model of its own.
pub(super) struct StagesAlone {
    group: ProcessGroup,
    mesh: Mesh,
    stages: Vec<Stage>,
    num_stages: usize,
}

struct Stage {
    stage: usize,
    pipeline: Pipeline,
    sgd: Sgd,
}

impl StagesAlone {
    /// Builds the stages of this rank again. All ranks call it.
    pub(super) fn new(group: &ProcessGroup, cut: &Pipeline, plan: &Plan) -> anyhow::Result<Self> {
        let own = group.split(Some(group.rank() as u32), 0)?.context("a rank is in its own group")?;
        let mesh = Mesh::along(&own, Axis::Pp)?;
        let program = plan.program();
        let num_stages = program.stages.num_stages();
        let is_own = |stage: &usize| program.stages.rank_of(*stage) == group.rank();
        let build = |stage: usize| {
            let order = Order::Program(in_turn(program, stage));
            let options =
                PipelineOptions { order, micro_batches: program.num_micro_batches, ..Default::default() };
            let pipeline = Pipeline::new(&layers(cut.layers()[stage].clone()), &mesh, options)?;
            fill_part(pipeline.store(), &names());
            let sgd = Sgd::new(pipeline.engine().parameters(), SgdOptions { lr: 0.0, ..Default::default() })?;
            anyhow::Ok(Stage { stage, pipeline, sgd })
        };
        let stages = (0..num_stages).filter(is_own).map(build).collect::<anyhow::Result<_>>()?;
        Ok(Self { group: group.clone(), mesh, stages, num_stages })
    }

    /// The mean times of all stages, in seconds, in one step. All ranks call it.
    pub(super) fn measure(&mut self, args: &PipelineArgs, step: usize) -> anyhow::Result<Vec<StageTimes>> {
        let mut seconds = vec![0.0; 3 * self.num_stages];
        self.group.barrier()?;
        for Stage { stage, pipeline, sgd } in &mut self.stages {
            let mut batches = micro_batches(args, step);
            if *stage > 0 {
                batches.iter_mut().for_each(|batch| batch.inputs = vec![hidden_states(args)]);
            }
            let brought = Brought { batches: batches.len(), count: 1.0, ..Default::default() };
            let agreed = Agreed::reach(&self.mesh, &brought)?;
            if *stage + 1 == self.num_stages {
                pipeline.step(&agreed, &batches, Scale::No, loss)?;
            } else {
                pipeline.step(&agreed, &batches, Scale::No, sum)?;
            }
            sgd.zero_grad()?;
            for (work, began, ended) in pipeline.spans() {
                let mean = (ended - began).as_secs_f64() / batches.len() as f64;
                seconds[3 * *stage + place(work)] += mean;
            }
        }
        self.group.all_reduce(&mut seconds, ReduceOp::Sum)?;
        let times = |times: &[f64]| StageTimes { forward: times[0], input: times[1], weight: times[2] };
        Ok(seconds.chunks(3).map(times).collect())
    }
}

/// Where the time of a computation counts. A whole backward counts as input gradients alone: only the sum matters then.
fn place(work: Work) -> usize {
    match work.compute {
        Compute::Forward => 0,
        Compute::Backward | Compute::Input => 1,
        Compute::Weight => 2,
    }
}

/// The backward of a stage begins where the next one would send a gradient.
fn sum(outputs: &[Tensor], _: &MicroBatch) -> Result<Tensor, LayerError> {
    Ok(outputs[0].f_sum(Kind::Float)?)
}

/// The computations of a stage, one micro-batch after the other.
fn in_turn(program: &Program, stage: usize) -> Program {
    let is_split = |work: Work| work.stage == stage && work.compute == Compute::Weight;
    let mut works = program.rows.iter().flatten().flat_map(|action| action.works());
    let kinds: &[Compute] = if works.any(is_split) {
        &[Compute::Forward, Compute::Input, Compute::Weight]
    } else {
        &[Compute::Forward, Compute::Backward]
    };
    let of_one = |micro_batch| {
        let work = move |compute| Action::Compute(Work { compute, stage: 0, micro_batch });
        kinds.iter().copied().map(work)
    };
    let mut row: Vec<Action> = (0..program.num_micro_batches).flat_map(of_one).collect();
    row.push(Action::ReduceGrad(0));
    Program {
        stages: StageMap::Loop { ranks: 1, chunks: 1 },
        num_micro_batches: program.num_micro_batches,
        rows: vec![row],
    }
}

#[cfg(test)]
mod tests {
    use drumline_plan::pipeline::Schedule;

    use super::*;

    #[test]
    fn a_stage_alone_does_what_it_does_in_its_program() {
        for (schedule, expected) in [(Schedule::OneFOneB, 2), (Schedule::ZeroBubble1P, 3)] {
            let plan = Order::from(schedule).plan(2, 4).unwrap();
            let alone = Plan::new(in_turn(plan.program(), 1)).unwrap();
            let works = alone.program().rows[0].iter().flat_map(|action| action.works()).count();
            assert_eq!(works, 4 * expected, "{schedule}");
        }
    }
}
