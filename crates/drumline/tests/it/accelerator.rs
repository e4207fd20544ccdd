//! `Accelerator`: a loop gives the same on any number of ranks, and each method does what it says.

mod collecting;
mod failing;
mod masks;
mod methods;
mod norms;
mod offloading;
mod planned;
mod precision;
mod saving;
mod sharded;
mod stages;
mod tracking;
mod windows;

use drumline::Accelerator;
use drumline::accelerator::{AcceleratorBuilder, PreparedLoader, PreparedModel, PreparedOptimizer};
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::optim::Sgd;
use tch::nn::{Module, VarStore};
use tch::{Device, Tensor};

use super::trainer::{
    Net, Pair, assert_reported_once, collate, data, data_seen, difference, folder, same_on_all_ranks, sample,
    sgd, weights,
};

/// Not a multiple of the big batch, nor of the number of ranks.
const SAMPLES: usize = 29;
const BIG_BATCH: usize = 8;

/// All samples, for one process.
fn whole<D: Dataset + 'static>(dataset: D, batch_size: usize) -> anyhow::Result<Loader<D>> {
    let sampler =
        DistributedSampler::new(SamplerOptions { num_samples: dataset.len(), ..Default::default() })?;
    Ok(Loader::new(dataset, sampler, LoaderOptions { batch_size, workers: 1, ..Default::default() })?)
}

/// The samples of an epoch, in the order of one process.
fn order(len: usize, epoch: u64) -> Vec<usize> {
    DistributedSampler::new(SamplerOptions { num_samples: len, ..Default::default() }).unwrap().indices(epoch)
}

/// Batches of one process.
fn big_batches(len: usize, epoch: u64) -> Vec<Pair> {
    let batch = |indices: &[usize]| collate(indices.iter().map(|index| sample(*index)).collect()).unwrap();
    order(len, epoch).chunks(BIG_BATCH).map(batch).collect()
}

/// One process, one batch a step, nothing prepared.
fn reference(epochs: u64) -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let mut optimizer = sgd(&store)?;
    for (x, y) in (0..epochs).flat_map(|epoch| big_batches(SAMPLES, epoch)) {
        drumline::optim::Optimizer::zero_grad(&mut optimizer)?;
        net.forward(&x).cross_entropy_for_logits(&y).backward();
        drumline::optim::Optimizer::step(&mut optimizer)?;
    }
    Ok(weights(&store))
}

/// An accelerated training of the usual net.
struct Training<D: Dataset> {
    accelerator: Accelerator,
    store: VarStore,
    model: PreparedModel<Net>,
    optimizer: PreparedOptimizer<Sgd>,
    loader: PreparedLoader<D>,
}

fn training<D: Dataset<Batch = Pair> + 'static>(
    builder: AcceleratorBuilder,
    dataset: D,
    batch_size: usize,
) -> anyhow::Result<Training<D>> {
    let accelerator = builder.cpu().build()?;
    let store = VarStore::new(accelerator.device());
    let net = Net::new(&store);
    let (model, optimizer, loader) =
        accelerator.prepare(net, &store, sgd(&store)?, whole(dataset, batch_size)?)?;
    Ok(Training { accelerator, store, model, optimizer, loader })
}

impl<D: Dataset<Batch = Pair> + 'static> Training<D> {
    fn backward(&self, (x, y): &Pair) -> anyhow::Result<()> {
        let loss = self.model.forward_t(x, true).cross_entropy_for_logits(y);
        Ok(self.accelerator.backward(&loss)?)
    }

    fn turn(&mut self, batch: &Pair) -> anyhow::Result<()> {
        self.backward(batch)?;
        self.optimizer.step()?;
        Ok(self.optimizer.zero_grad()?)
    }

    fn epoch(&mut self, epoch: u64) -> anyhow::Result<()> {
        for batch in self.loader.epoch(epoch) {
            self.turn(&batch?)?;
        }
        Ok(())
    }
}
