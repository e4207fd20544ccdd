//! Training steps of the cut GPT, each beside the same step of stages that wait for nobody.

use std::time::Instant;

use anyhow::ensure;
use drumline::comm::{Axis, Mesh};
use drumline::engine::pipeline::{Pipeline, PipelineOptions, Scale};
use drumline::engine::{Agreed, Brought};
use drumline::optim::{Optimizer, Sgd, SgdOptions};
use drumline::{ProcessGroup, ReduceOp};
use drumline_plan::pipeline::{StageTimes, Times};
use drumline_zoo::formula::fill_part;
use serde_json::{Value, json};

use super::alone::StagesAlone;
use super::model::{layers, loss, micro_batches, names, num_layers};
use super::{How, PipelineArgs, hop, median, simulated};

const WARM_UP: usize = 2;
const LR: f64 = 0.01;

/// Trains. The optimizer's step is not timed: it is the same for everybody.
pub(super) fn run(args: &PipelineArgs, group: &ProcessGroup) -> anyhow::Result<Value> {
    let is_alone = args.how == How::Alone;
    ensure!(!is_alone || group.size() == 1, "--how alone is for one rank; try --nproc-per-node 1");
    let ranks = if is_alone { args.ranks } else { group.size() };
    let mesh = Mesh::along(group, Axis::Pp)?;
    let options = PipelineOptions {
        order: args.order(),
        ranks: Some(ranks),
        micro_batches: args.micro_batches,
        ..Default::default()
    };
    let pipeline = Pipeline::new(&layers(0..num_layers()), &mesh, options)?;
    fill_part(pipeline.store(), &names());
    let engine = pipeline.engine();
    let mut sgd = Sgd::new(engine.parameters(), SgdOptions { lr: LR, ..Default::default() })?;
    engine.adopt(&mut sgd)?;
    let plan = args.order().plan(ranks, args.micro_batches)?;
    let mut alone = (!is_alone).then(|| StagesAlone::new(group, &pipeline, &plan)).transpose()?;
    let hop = hop::measure(group, args.message_bytes())?;

    let (mut times, mut losses, mut of_stages) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..WARM_UP + args.steps {
        if let Some(alone) = &mut alone {
            of_stages.push(alone.measure(args, step)?);
        }
        let batches = micro_batches(args, step);
        let count = args.micro_batches as f64 * (args.batch * args.places) as f64;
        let brought = Brought { batches: batches.len(), count, ..Default::default() };
        let agreed = Agreed::reach(&mesh, &brought)?;
        group.barrier()?;
        let began = Instant::now();
        let of_step = pipeline.step(&agreed, &batches, Scale::No, loss)?;
        times.push(began.elapsed().as_secs_f64());
        losses.push(of_step.mean());
        engine.step(&mut sgd)?;
        sgd.zero_grad()?;
    }
    group.all_reduce(&mut times, ReduceOp::Max)?;
    times.drain(..WARM_UP);
    let step_ms = 1e3 * median(times.clone());
    if is_alone {
        return Ok(json!({"step_ms": step_ms, "losses": losses}));
    }
    of_stages.drain(..WARM_UP);
    let makespans = |hop: f64| -> anyhow::Result<Vec<f64>> {
        let makespan = |stages: &Vec<StageTimes>| simulated(&plan, &Times { stages: stages.clone(), hop });
        of_stages.iter().map(makespan).collect()
    };
    // Each step is compared with the times that were measured beside it.
    let of_step = |makespans: Vec<f64>| {
        let ratios = makespans.iter().zip(&times).map(|(makespan, step)| makespan / step);
        step_ms * median(ratios.collect())
    };
    let shown = |value: fn(&StageTimes) -> f64| -> Vec<f64> {
        let stages = 0..plan.program().stages.num_stages();
        let of_stage = |stage: usize| of_stages.iter().map(|stages| 1e3 * value(&stages[stage])).collect();
        stages.map(|stage| median(of_stage(stage))).collect()
    };
    Ok(json!({
        "step_ms": step_ms,
        "losses": losses,
        "ideal_ms": of_step(makespans(0.0)?),
        "simulated_ms": of_step(makespans(hop)?),
        "hop_ms": 1e3 * hop,
        "forward_ms": shown(|times| times.forward),
        "input_ms": shown(|times| times.input),
        "weight_ms": shown(|times| times.weight),
    }))
}
