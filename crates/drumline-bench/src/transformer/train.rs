//! Steps of training: forward, label-smoothed loss, backward with the gradients' mean over ranks, Adam.

use std::time::Instant;

use anyhow::Context;
use drumline::optim::{Adam, AdamOptions, Optimizer, parameters};
use drumline::trainer::{CrossEntropy, Loss, Mode, Model};
use drumline::{Ddp, DdpOptions, ProcessGroup, ReduceOp};
use drumline_observe::status::Memory;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use tch::nn::VarStore;

use super::batches::Batches;
use super::{TransformerArgs, median};
use drumline_zoo::models::transformer::{Pairs, Specials, Transformer};
use drumline_zoo::words::WordLoss;

/// What the timed steps cost this rank.
struct Measured {
    /// Milliseconds of each step.
    times: Vec<f64>,
    /// Seconds of the processor, all threads together.
    cpu: f64,
    /// This rank's share of the mean loss of all steps, those of the warm-up as well.
    losses: Vec<f64>,
    /// Words of the timed steps, all ranks together.
    words: usize,
}

/// What a step changes.
struct Learner {
    ddp: Ddp<Transformer>,
    optimizer: Adam,
}

pub(super) fn run(
    args: &TransformerArgs,
    model: Transformer,
    store: &VarStore,
    batches: &Batches,
) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let adam = AdamOptions { lr: 1e-4, betas: (0.9, 0.98), eps: 1e-9, ..Default::default() };
    let optimizer = Adam::new(parameters(store), adam)?;
    let ddp = Ddp::new(model, store, &group, DdpOptions::default())?;
    let learner = Learner { ddp, optimizer };
    let Measured { mut times, cpu, mut losses, words } = steps(args, &group, learner, batches)?;
    let mut cpu = [cpu];
    group.all_reduce(&mut times, ReduceOp::Max)?;
    group.all_reduce(&mut losses, ReduceOp::Sum)?;
    group.all_reduce(&mut cpu, ReduceOp::Sum)?;
    let tokens_per_s = words as f64 / times.iter().sum::<f64>() * 1e3;
    let cpu_ms = cpu[0] / args.steps as f64 * 1e3;
    let peak_bytes = Memory::of_this_process().context("cannot read /proc/self/status")?.peak;
    if group.rank() == 0 {
        let line = json!({"step_ms": median(times), "tokens_per_s": tokens_per_s, "cpu_ms": cpu_ms,
            "losses": losses, "peak_bytes": peak_bytes});
        println!("{line}");
    }
    Ok(())
}

fn steps(
    args: &TransformerArgs,
    group: &ProcessGroup,
    Learner { ddp, mut optimizer }: Learner,
    batches: &Batches,
) -> anyhow::Result<Measured> {
    let loss = WordLoss(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() });
    let mut measured = Measured { times: Vec::new(), cpu: 0.0, losses: Vec::new(), words: 0 };
    for step in 0..args.warm_up + args.steps {
        let of_ranks = &batches.steps[step % batches.steps.len()];
        let mine = of_ranks.get(group.rank()).context("the batches are of fewer ranks")?;
        let words: usize = of_ranks.iter().take(group.size()).map(|batch| batch.num_words()).sum();
        let batch = Pairs::new(&mine.sources, &mine.targets, Specials::default());
        group.barrier()?;
        let (began, cpu) = (Instant::now(), cpu_seconds());
        optimizer.zero_grad()?;
        let sum = ddp.forward_with(|model| {
            let logits = model.forward_batch(&batch, Mode::Train)?;
            loss.sum(&logits, &batch)
        })?;
        let share = sum.map_err(anyhow::Error::from_boxed)? / words as f64;
        // The mean of gradients over ranks becomes their sum.
        ddp.backward(&(&share * group.size() as f64))?;
        optimizer.step()?;
        if step >= args.warm_up {
            measured.times.push(began.elapsed().as_secs_f64() * 1e3);
            measured.cpu += cpu_seconds() - cpu;
            measured.words += words;
        }
        measured.losses.push(share.double_value(&[]));
    }
    Ok(measured)
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
