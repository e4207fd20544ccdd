//! A whole step with reduction over NCCL as one CUDA graph, against the same steps in eager mode.

use anyhow::Result;
use drumline_comm::ReduceOp;
use drumline_parallel::{Ddp, DdpOptions, ParallelError};
use drumline_torch::cuda::{Graph, GraphedStep, Pool, Priority, Stream};
use drumline_torch::{Optimizer, Sgd, SgdOptions, TensorCollectives, TorchError, parameters};
use rank_test::ranks_test;
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::net::{Net, loss, samples};
use super::{GPU, join};

const STEPS: i64 = 12;

/// Losses of all steps, as one graph from the fourth on or in eager mode.
fn losses(is_graphed: bool) -> Result<Vec<f64>> {
    let group = join()?;
    let vs = VarStore::new(GPU);
    let net = Net::new(&vs, 0);
    let options =
        DdpOptions { bucket_cap: 200, first_bucket: 64, reduces_alone: true, ..DdpOptions::default() };
    let ddp = Ddp::new(net, &vs, &group, options)?;
    let mut optimizer = Sgd::new(parameters(&vs), SgdOptions { lr: 0.1, ..SgdOptions::default() })?;
    let (x, y) = samples(0..16);
    let (mut x, mut y) = (x.to_device(GPU), y.to_device(GPU));
    let mut graphed = GraphedStep::new(0)?;
    let mut found = Vec::new();
    for step in 0..STEPS {
        let (next_x, next_y) = samples(step * 16..step * 16 + 16);
        x.copy_(&next_x);
        y.copy_(&next_y);
        let mut make = || -> std::result::Result<Tensor, ParallelError> {
            optimizer.zero_grad()?;
            let loss = loss(&ddp.forward(&x)?, &y);
            ddp.backward(&loss)?;
            optimizer.step()?;
            Ok(loss.detach())
        };
        let loss = if is_graphed { graphed.run(make)?.double_value(&[]) } else { make()?.double_value(&[]) };
        found.push(loss);
    }
    assert_eq!(graphed.is_recorded(), is_graphed);
    Ok(found)
}

ranks_test!(a_recorded_step_has_the_losses_of_one_that_is_not, 1, timeout = super::BRIEF, {
    let (eager, graphed) = (losses(false)?, losses(true)?);
    assert!(eager[0] > eager[STEPS as usize - 1], "it learns: {eager:?}");
    for (step, (eager, graphed)) in eager.iter().zip(&graphed).enumerate() {
        assert!((eager - graphed).abs() < 1e-6, "step {step}: {eager} {graphed}");
    }
});

ranks_test!(a_recorded_collective_runs_with_each_launch, 1, timeout = super::BRIEF, {
    let group = join()?;
    let mut x = Tensor::ones([1000], (Kind::Float, GPU));
    group.all_reduce_tensor(&mut x, ReduceOp::PreMulSum(2.0))?;
    let stream = Stream::new(0, Priority::Normal)?;
    let scope = stream.enter()?;
    stream.synchronize()?;
    let (graph, ()) =
        Graph::record(Pool::new()?, || group.all_reduce_tensor(&mut x, ReduceOp::PreMulSum(2.0)))?;
    (0..3).try_for_each(|_| graph.launch())?;
    stream.synchronize()?;
    drop(scope);
    assert_eq!(x.double_value(&[999]), 16.0);
});

ranks_test!(what_goes_through_the_host_is_refused_in_a_recording, 2, {
    let group = join()?;
    let mut x = Tensor::ones([1000], (Kind::Float, GPU));
    group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
    let stream = Stream::new(0, Priority::Normal)?;
    let scope = stream.enter()?;
    let refused = Graph::record(Pool::new()?, || {
        group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
        Ok::<_, TorchError>(())
    });
    drop(scope);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("share the GPU") && error.contains("cannot be recorded"), "{error}");
    group.all_reduce_tensor(&mut x, ReduceOp::Sum)?;
    assert_eq!(x.double_value(&[0]), 4.0, "and works as before");
});
