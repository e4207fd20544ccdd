//! How long a step takes on the 11.7 million parameters of a ResNet-18: ours on the fused kernels, and tch's.
//!
//! `cargo run --release -p drumline-torch --example optim_speed`; one thread, both in turns, medians in milliseconds.

use std::time::Instant;

use anyhow::Result;
use drumline_torch::{
    AdamOptions, AdamW, Named, Optimizer, Sgd, SgdOptions, TorchError, parameters, set_grad,
};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

const ROUNDS: usize = 15;

fn main() -> Result<()> {
    tch::set_num_threads(1);
    let (ours, theirs) = (model()?, model()?);
    let options =
        SgdOptions { lr: 1e-3, momentum: 0.9, nesterov: true, weight_decay: 5e-5, ..Default::default() };
    let mut sgd = Sgd::new(parameters(&ours), options)?;
    let mut tch_sgd =
        nn::Sgd { momentum: 0.9, dampening: 0., wd: 5e-5, nesterov: true }.build(&theirs, 1e-3)?;
    compare("SGD, momentum, nesterov, weight decay", || sgd.step(), || tch_sgd.step())?;

    let mut adamw = AdamW::new(parameters(&ours), AdamOptions::default())?;
    let mut tch_adamw = nn::AdamW { wd: 1e-2, ..Default::default() }.build(&theirs, 1e-3)?;
    compare("AdamW", || adamw.step(), || tch_adamw.step())
}

/// Both in turns, so that what else goes on in the machine slows both.
fn compare(
    name: &str,
    mut ours: impl FnMut() -> Result<(), TorchError>,
    mut theirs: impl FnMut(),
) -> Result<()> {
    let (mut our_times, mut their_times) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (our_time, outcome) = timed(&mut ours);
        outcome?;
        let (their_time, ()) = timed(&mut theirs);
        // The first step makes the state.
        if round > 0 {
            our_times.push(our_time);
            their_times.push(their_time);
        }
    }
    let (our_time, their_time) = (median(our_times), median(their_times));
    println!(
        "{name}: fused {our_time:.1} ms, tch {their_time:.1} ms, {:.1} times as fast",
        their_time / our_time
    );
    Ok(())
}

/// In milliseconds.
fn timed<T>(step: &mut impl FnMut() -> T) -> (f64, T) {
    let start = Instant::now();
    let outcome = step();
    (start.elapsed().as_secs_f64() * 1e3, outcome)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The parameters of a ResNet-18, each with a gradient.
fn model() -> Result<VarStore> {
    let vs = VarStore::new(Device::Cpu);
    let _net = tch::vision::resnet::resnet18(&vs.root(), 1000);
    for Named { tensor, .. } in parameters(&vs) {
        set_grad(&tensor, Some(&(Tensor::randn(tensor.size(), (Kind::Float, Device::Cpu)) * 1e-2)))?;
    }
    Ok(vs)
}
