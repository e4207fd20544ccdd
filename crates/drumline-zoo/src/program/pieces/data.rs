//! Batches of images for one rank, from what lies in the folders of `TRAIN` and `TEST`.

use std::sync::Arc;

use drumline::{DistributedSampler, EvalSampler, Loader, LoaderOptions, SamplerOptions};

use crate::config::{Config, DataKind};
pub(in crate::program) use crate::data::Images;
use crate::data::{Cifar, CifarKind, Dummy, ImageFolder, Split};
use crate::program::checked::{Checked, CheckedTraining};
use crate::program::data_kind::Found;
use crate::transforms::Transform;

/// Images of an epoch where there is no data set.
const DUMMY: usize = 1000;
/// Batches that a thread may be ahead.
const PREFETCH: usize = 2;

/// The training images.
pub(in crate::program) fn train_images(checked: &CheckedTraining) -> anyhow::Result<Images> {
    let (config, kind) = (&checked.run.config, checked.train.kind);
    let transform = if config.train.augment { augmented(config, kind) } else { plain(config, kind) };
    open(&checked.train, Split::Train, transform, config)
}

/// Which of the training images a rank takes, as PyTorch's sampler shares them out.
pub(in crate::program) fn train_sampler(
    images: &Images,
    config: &Config,
    (rank, num_replicas): (usize, usize),
    seed: u64,
) -> anyhow::Result<DistributedSampler> {
    use drumline::Dataset;
    let (shuffle, num_samples) = (config.train.shuffle, images.len());
    let options = SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last: false };
    Ok(DistributedSampler::new(options)?)
}

/// A rank's share of the training images; the same wherever it is loaded.
pub(in crate::program) fn train_loader(
    images: &Arc<Images>,
    config: &Config,
    place: (usize, usize),
    seed: u64,
) -> anyhow::Result<Loader<Images>> {
    let sampler = train_sampler(images, config, place, seed)?;
    Ok(Loader::shared(Arc::clone(images), sampler, options_of(config, config.train.batch_size))?)
}

/// The test images.
pub(in crate::program) fn test_images(checked: &Checked) -> anyhow::Result<Images> {
    open(&checked.test, Split::Test, plain(&checked.config, checked.test.kind), &checked.config)
}

/// A rank's share of the test images: each once over all ranks.
pub(in crate::program) fn test_loader(
    images: Images,
    config: &Config,
    (rank, num_replicas): (usize, usize),
) -> anyhow::Result<Loader<Images>> {
    use drumline::Dataset;
    let images = Arc::new(images);
    let sampler = EvalSampler::new(images.len(), num_replicas, rank)?;
    Ok(Loader::shared(images, sampler, options_of(config, config.test.batch_size))?)
}

fn options_of(config: &Config, batch_size: usize) -> LoaderOptions {
    let (workers, pin_memory) = (config.train.workers, config.train.pin_memory);
    LoaderOptions { batch_size, workers, prefetch: PREFETCH, drop_last: false, pin_memory }
}

fn open(found: &Found, split: Split, transform: Transform, config: &Config) -> anyhow::Result<Images> {
    let (folder, classes) = (&found.folder, config.model.num_classes as i64);
    let images = match found.kind {
        DataKind::Dummy => Images::Dummy(Dummy::new(DUMMY, classes, transform)),
        DataKind::Cifar10 => Images::Cifar(Cifar::open_kind(CifarKind::Cifar10, folder, split, transform)?),
        DataKind::Cifar100 => Images::Cifar(Cifar::open_kind(CifarKind::Cifar100, folder, split, transform)?),
        DataKind::Folder | DataKind::Auto => Images::Folder(ImageFolder::open(folder, transform)?),
    };
    images.check_classes(classes, folder)?;
    Ok(images)
}

fn augmented(config: &Config, kind: DataKind) -> Transform {
    match kind {
        DataKind::Cifar10 | DataKind::Cifar100 => Transform::cifar_train(),
        DataKind::Dummy => plain(config, kind),
        _ => Transform::imagenet_train(config.train.im_size),
    }
}

fn plain(config: &Config, kind: DataKind) -> Transform {
    let size = config.train.im_size;
    match kind {
        DataKind::Cifar10 | DataKind::Cifar100 => Transform::cifar_test(),
        DataKind::Dummy => Transform::imagenet_test(size, size),
        _ => Transform::imagenet_test(config.test.im_size, size),
    }
}
