//! What two replicas of ResNet-18 exchange in one training step on 64 images, stage by stage: DataParallel beside Ddp.
//!
//! ```text
//!   cargo run -p drumline-examples --bin dp_vs_ddp
//! ```
//! Both are counted in a real step. The ranks of Ddp are threads here; as processes they send the same bytes.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline::comm::LocalGroup;
use drumline::engine::{CommHook, DataParallel, GradBucket, StageBytes};
use drumline::optim::{buffers, parameters};
use drumline::torch::TorchError;
use drumline::{Ddp, DdpOptions, ProcessGroup, ReduceOp};
use drumline_zoo::models::{Model, ModelOptions, build};
use tch::nn::{Path, VarStore};
use tch::{Device, Kind, Tensor};

const REPLICAS: usize = 2;
const BATCH: i64 = 64;
const CLASSES: i64 = 10;

fn main() -> anyhow::Result<()> {
    let dp = data_parallel()?;
    let ddp = LocalGroup::run(REPLICAS, |group| Ok(distributed(&group)))?.swap_remove(0)?;
    println!("| stage | DataParallel | bytes | Ddp | bytes |\n|---|---|---:|---|---:|");
    let row = |stage, one, bytes, all, sent| println!("| {stage} | {one} | {bytes} | {all} | {sent} |");
    row("1 forward", "inputs to the other device", dp.scatter_inputs, "buffers of rank 0", ddp.buffers);
    row("2 outputs", "to the first device", dp.gather_outputs, "stay", 0);
    row("3 loss", "on the first device", 0, "each rank its own", 0);
    row("4 gradients of outputs", "to the other device", dp.scatter_gradients, "stay", 0);
    row("5 backward", "each device its part", 0, "each rank its own", 0);
    row("6 gradients of parameters", "to the first device", dp.reduce_gradients, "all-reduced", ddp.reduced);
    row("7 update", "on the first device", 0, "each rank its own", 0);
    row("8 parameters", "and buffers, to the other device", dp.replicate, "equal already", 0);
    println!(
        "\nDdp, once at the start: {} bytes of parameters and {} of buffers",
        ddp.parameters, ddp.buffers
    );
    println!("buckets, in the order of reduction: {:?} bytes", ddp.buckets);
    println!("gradients of a rank: {} bytes, of which {} lie in the buckets", ddp.gradients, ddp.in_buckets);
    Ok(())
}

/// One step of one process with two replicas.
fn data_parallel() -> anyhow::Result<StageBytes> {
    let mut model = DataParallel::new(&[Device::Cpu; REPLICAS], |path| resnet18(&path))?;
    let loss = model.forward_t(&images(BATCH), true)?.cross_entropy_for_logits(&labels(BATCH));
    model.backward(&loss)?;
    Ok(model.traffic())
}

/// The bytes of a rank with Ddp.
struct Counted {
    parameters: usize,
    buffers: usize,
    buckets: Vec<usize>,
    reduced: usize,
    gradients: usize,
    in_buckets: usize,
}

/// Two steps of one of two ranks. In the second the buckets have their final order.
fn distributed(group: &ProcessGroup) -> anyhow::Result<Counted> {
    let store = VarStore::new(Device::Cpu);
    let hook = Watch::default();
    let options = DdpOptions { hook: Box::new(hook.clone()), ..Default::default() };
    let model = Ddp::new(resnet18(&store.root()), &store, group, options)?;
    let own = BATCH / group.size() as i64;
    for _ in 0..2 {
        hook.reduced().clear();
        let loss = model.forward(&images(own))?.cross_entropy_for_logits(&labels(own));
        model.backward(&loss)?;
    }
    let parameters = parameters(&store);
    let gradients: Vec<Tensor> = parameters.iter().map(|named| named.tensor.grad()).collect();
    let reduced = hook.reduced();
    let lies_there = |gradient: &&Tensor| reduced.iter().any(|range| range.contains(&address(gradient)));
    Ok(Counted {
        parameters: parameters.iter().map(|named| bytes(&named.tensor)).sum(),
        buffers: buffers(&store).iter().map(|named| bytes(&named.tensor)).sum(),
        buckets: model.bucket_bytes(),
        reduced: reduced.iter().map(ExactSizeIterator::len).sum(),
        gradients: gradients.iter().map(bytes).sum(),
        in_buckets: gradients.iter().filter(lies_there).map(bytes).sum(),
    })
}

/// Reduces as usual, and records the memory of each bucket.
#[derive(Clone, Default)]
struct Watch(Arc<Mutex<Vec<Range<usize>>>>);

impl Watch {
    fn reduced(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommHook for Watch {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        let tensor = bucket.tensor();
        self.reduced().push(address(&tensor)..address(&tensor) + bytes(&tensor));
        bucket.all_reduce(group, ReduceOp::Avg)
    }
}

fn resnet18(path: &Path<'_>) -> Model {
    let options = ModelOptions { num_classes: CLASSES, ..Default::default() };
    build("resnet18", path, &options).expect("the zoo has it")
}

fn images(count: i64) -> Tensor {
    Tensor::rand([count, 3, 32, 32], (Kind::Float, Device::Cpu))
}

fn labels(count: i64) -> Tensor {
    Tensor::arange(count, (Kind::Int64, Device::Cpu)).remainder(CLASSES)
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

fn address(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}
