//! Images on a GPU: the same batches as on the CPU, on any stream, and the same training.

use std::path::Path;

use drumline::comm::LocalGroup;
use drumline::data::{Dataset, DistributedSampler, Loader, LoaderOptions, Sample, SamplerOptions};
use drumline::optim::{Sgd, SgdOptions, parameters};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use drumline_torch::cuda::{self, Priority, Stream};
use drumline_zoo::data::{BatchLayout, Images};
use drumline_zoo::models::{ModelOptions, build};
use drumline_zoo::synth_cifar;
use drumline_zoo::transforms::Transform;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);
const IMAGES: usize = 260;

fn open(folder: &Path) -> Images {
    Images::open(folder, "train", Transform::cifar_train()).unwrap()
}

fn folder() -> tempfile::TempDir {
    cuda::open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    synth_cifar::write(folder.path(), IMAGES, 5, 1).unwrap();
    folder
}

#[test]
fn batches_equal_those_of_the_cpu_to_the_bit() {
    let folder = folder();
    let host = open(folder.path());
    for layout in [BatchLayout::Contiguous, BatchLayout::ChannelsLast] {
        let device = open(folder.path()).on_device(GPU, layout).unwrap();
        for epoch in 0..3 {
            let samples: Vec<_> = (0..IMAGES).rev().map(|index| Sample::new(7, epoch, index)).collect();
            let (a, b) = (host.batch(&samples).unwrap(), device.batch(&samples).unwrap());
            assert_eq!((b.images.device(), b.labels.device()), (GPU, GPU));
            assert_eq!(b.images.stride()[1] == 1, layout == BatchLayout::ChannelsLast);
            assert_eq!(
                (a.images, a.labels),
                (b.images.to_device(Device::Cpu), b.labels.to_device(Device::Cpu))
            );
        }
    }
}

/// Sums of all batches, one epoch after the other, without synchronisation in between.
fn sums(images: Images) -> Tensor {
    let sampler = SamplerOptions { num_samples: IMAGES, ..Default::default() };
    let options = LoaderOptions { batch_size: 32, workers: 4, pin_memory: true, ..Default::default() };
    let loader = Loader::new(images, DistributedSampler::new(sampler).unwrap(), options).unwrap();
    let batches = (0..20).flat_map(|epoch| loader.epoch(epoch)).map(|batch| batch.unwrap());
    let sums: Vec<_> = batches
        .map(|batch| {
            let batch = batch.to_device(GPU).unwrap();
            batch
                .images
                .sum_dim_intlist([1, 2, 3].as_slice(), false, tch::Kind::Double)
                .dot(&batch.labels.to_kind(tch::Kind::Double))
        })
        .collect();
    Tensor::stack(&sums, 0).to_device(Device::Cpu)
}

#[test]
fn a_loader_makes_batches_on_the_stream_of_the_caller() {
    let folder = folder();
    let expected = sums(open(folder.path()));
    let device = || open(folder.path()).on_device(GPU, BatchLayout::ChannelsLast).unwrap();
    assert!(expected.allclose(&sums(device()), 1e-9, 1e-6, false));
    let resident = device();
    let _scope = Stream::new(0, Priority::Normal).unwrap().enter().unwrap();
    assert!(expected.allclose(&sums(resident), 1e-9, 1e-6, false), "on a stream of its own");
}

/// The weights after some epochs, in each of which the last batch is smaller.
fn trained(folder: &Path, is_on_device: bool) -> Vec<Tensor> {
    let weights = LocalGroup::run(1, |group| {
        tch::manual_seed(3);
        let store = VarStore::new(GPU);
        let options = ModelOptions { num_classes: 10, ..Default::default() };
        let net = build("convnet", &store.root(), &options).unwrap().channels_last(&store).unwrap();
        let images = open(folder);
        let images =
            if is_on_device { images.on_device(GPU, BatchLayout::ChannelsLast).unwrap() } else { images };
        let sgd = Sgd::new(parameters(&store), SgdOptions { lr: 0.01, momentum: 0.9, ..Default::default() });
        DistTrainer::new(&group, &net, &store, images)
            .loss(CrossEntropy::default())
            .optimizer(sgd.unwrap())
            .batch_size_per_gpu(32)
            .n_epochs(2)
            .num_workers(2)
            .pin_memory(true)
            .seed(5)
            .print_every(0)
            .train(LoadBestModel::No)
            .unwrap();
        Ok(parameters(&store)
            .iter()
            .map(|named| named.tensor.detach().to_device(Device::Cpu))
            .collect::<Vec<_>>())
    });
    weights.unwrap().remove(0)
}

/// The difference between weights, relative to their size.
fn apart(some: &[Tensor], others: &[Tensor]) -> f64 {
    let norm = |tensors: &mut dyn Iterator<Item = Tensor>| {
        tensors.map(|tensor| tensor.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt()
    };
    let off = norm(&mut some.iter().zip(others).map(|(a, b)| a - b));
    off / norm(&mut some.iter().map(Tensor::shallow_clone))
}

#[test]
fn a_training_with_graphs_learns_the_same() {
    let folder = folder();
    let [host, again, device] = [false, false, true].map(|is_on_device| trained(folder.path(), is_on_device));
    // The order of cuDNN's sums varies; the same training twice shows how much that matters.
    let (control, off) = (apart(&host, &again), apart(&host, &device));
    assert!(off < (4.0 * control).max(1e-3) && off < 2e-2, "{off}, the same training again {control}");
}
