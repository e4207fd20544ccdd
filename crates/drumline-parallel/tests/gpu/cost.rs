//! Measures the cost of reduction on a GPU, and prints it. Run with `--nocapture`.

use std::time::Instant;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions, ParallelError};
use drumline_torch::cuda::{self, GraphedStep};
use drumline_torch::{Optimizer, Sgd, SgdOptions, TensorCollectives, parameters};
use rank_test::ranks_test;
use tch::nn::{Module, VarStore, linear, seq};
use tch::{Kind, Tensor};

use super::{GPU, join};

const STEPS: usize = 100;
const WIDTH: i64 = 1024;

/// Milliseconds of a step of a model of 17 million parameters.
fn step_time(group: &ProcessGroup, reduces_alone: bool, is_graphed: bool) -> Result<f64> {
    let vs = VarStore::new(GPU);
    let layer = |index: i64| linear(vs.root() / index, WIDTH, WIDTH, Default::default());
    let net = (0..16).fold(seq(), |net, index| net.add(layer(index)).add_fn(Tensor::relu));
    let ddp = Ddp::new(net, &vs, group, DdpOptions { reduces_alone, ..DdpOptions::default() })?;
    let mut optimizer = Sgd::new(parameters(&vs), SgdOptions { lr: 1e-3, ..SgdOptions::default() })?;
    let x = Tensor::rand([4096, WIDTH], (Kind::Float, GPU));
    let mut graphed = GraphedStep::new(0)?;
    let mut began = Instant::now();
    for step in 0..STEPS + 20 {
        if step == 20 {
            cuda::synchronize(0)?;
            began = Instant::now();
        }
        let mut make = || -> std::result::Result<(), ParallelError> {
            optimizer.zero_grad()?;
            ddp.backward(&ddp.module().forward(&x).square().mean(Kind::Float))?;
            Ok(optimizer.step()?)
        };
        if is_graphed {
            graphed.run(make)?;
        } else {
            make()?;
        }
    }
    cuda::synchronize(0)?;
    Ok(began.elapsed().as_secs_f64() * 1e3 / STEPS as f64)
}

ranks_test!(
    a_rank_alone_over_nccl_against_no_group,
    1,
    timeout = std::time::Duration::from_secs(40),
    {
        let group = join()?;
        for is_graphed in [false, true] {
            let mut best = [f64::MAX; 2];
            for _round in 0..3 {
                for reduces_alone in [false, true] {
                    let time = step_time(&group, reduces_alone, is_graphed)?;
                    best[usize::from(reduces_alone)] = best[usize::from(reduces_alone)].min(time);
                }
            }
            let [without, with] = best;
            let way = if is_graphed { "as one graph" } else { "eager" };
            println!(
                "cost: {way}: {without:.3} ms without a group, {with:.3} ms over NCCL: {:+.2} %",
                (with / without - 1.0) * 100.0
            );
        }
    },
    |ranks| {
        print_costs(&ranks.pass()?.ranks[0].stdout);
    }
);

ranks_test!(
    an_all_reduce_of_ranks_that_share_a_gpu,
    4,
    timeout = std::time::Duration::from_secs(40),
    {
        let group = join()?;
        for megabytes in [1, 16, 64] {
            let mut x = Tensor::zeros([megabytes << 18], (Kind::Float, GPU));
            let mut times = Vec::new();
            for _ in 0..20 {
                group.barrier()?;
                let began = Instant::now();
                group.all_reduce_tensor(&mut x, drumline_comm::ReduceOp::Avg)?;
                cuda::synchronize(0)?;
                times.push(began.elapsed().as_secs_f64() * 1e3);
            }
            times.sort_by(f64::total_cmp);
            println!(
                "cost: all-reduce of {megabytes} MiB by {} ranks on one GPU: {:.3} ms",
                group.size(),
                times[10]
            );
        }
    },
    |ranks| {
        print_costs(&ranks.pass()?.ranks[0].stdout);
    }
);

fn print_costs(stdout: &[u8]) {
    String::from_utf8_lossy(stdout)
        .lines()
        .filter(|line| line.contains("cost: "))
        .for_each(|line| println!("{line}"));
}
