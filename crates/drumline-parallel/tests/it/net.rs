//! A small model, data that every rank can make, and training in one process as the reference.

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::{Ddp, DdpOptions};
use drumline_torch::{Named, parameters, set_grad};
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

/// Two layers, and an optional third layer.
#[derive(Debug)]
pub(crate) struct Net {
    first: Linear,
    second: Linear,
    pub(crate) extra: Linear,
}

impl Net {
    /// With parameters that depend on `seed` alone.
    pub(crate) fn new(vs: &VarStore, seed: i64) -> Self {
        tch::set_num_threads(1);
        let layer = |name: &str, from, to| linear(vs.root() / name, from, to, Default::default());
        let net = Self {
            first: layer("first", 6, 12),
            second: layer("second", 12, 3),
            extra: layer("extra", 3, 3),
        };
        for (place, named) in parameters(vs).iter().enumerate() {
            let numel = named.tensor.numel() as i64;
            let values = (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 0.7
                + (place as i64 + seed) as f64)
                .sin();
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&(values * 0.3).view_as(&named.tensor)));
        }
        net
    }
}

impl Module for Net {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.second.forward(&self.first.forward(input).tanh())
    }
}

/// Samples `range` of an endless data set: inputs and targets.
pub(crate) fn samples(range: std::ops::Range<i64>) -> (Tensor, Tensor) {
    let rows = Tensor::arange_start(range.start, range.end, (Kind::Float, Device::Cpu)).unsqueeze(1);
    let columns = Tensor::arange(6, (Kind::Float, Device::Cpu));
    let x = (rows * 1.3 + columns * 0.9).sin();
    let y = x.narrow(1, 0, 3) * x.narrow(1, 3, 3);
    (x, y)
}

pub(crate) fn loss(output: &Tensor, target: &Tensor) -> Tensor {
    output.mse_loss(target, tch::Reduction::Mean)
}

/// One step of plain gradient descent; afterwards gradients are undefined.
pub(crate) fn descend(params: &[Named]) -> Result<()> {
    for Named { tensor, .. } in params {
        let grad = tensor.grad();
        if grad.defined() {
            tch::no_grad(|| drop(tensor.shallow_clone().f_sub_(&(grad * 0.1))));
        }
        set_grad(tensor, None)?;
    }
    Ok(())
}

/// The parameters after `steps` steps of one process on the batches `batch(step)`.
pub(crate) fn alone(steps: i64, batch: impl Fn(i64) -> (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    let vs = VarStore::new(Device::Cpu);
    let net = Net::new(&vs, 0);
    for step in 0..steps {
        let (x, y) = batch(step);
        loss(&net.forward(&x), &y).backward();
        descend(&parameters(&vs))?;
    }
    Ok(values(&parameters(&vs)))
}

/// A replica on this rank.
pub(crate) fn replica(group: &ProcessGroup, vs: &VarStore) -> Result<Ddp<Net>> {
    // Other ranks begin with other parameters, and must get those of rank 0.
    let net = Net::new(vs, group.rank() as i64 * 10);
    // About one bucket per parameter, so that their order matters.
    let options = DdpOptions { bucket_cap: 200, first_bucket: 64, ..DdpOptions::default() };
    Ok(Ddp::new(net, vs, group, options)?)
}

pub(crate) fn values(params: &[Named]) -> Vec<Tensor> {
    params.iter().map(|named| named.tensor.detach().copy()).collect()
}

#[track_caller]
pub(crate) fn assert_close(ours: &[Tensor], theirs: &[Tensor], tolerance: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (place, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let difference = f64::try_from((a - b).abs().max()).unwrap();
        assert!(difference <= tolerance, "tensor {place} differs by {difference:e}: {a:?} {b:?}");
    }
}
