//! Opens the datasets of `TRAIN` and `TEST` with their transforms.

use super::config::ImageConfig;
use super::data_set::Found;
use crate::config::DataKind;
use crate::data::{Cifar, CifarKind, Dummy, ImageFolder, Images, Split};
use crate::transforms::Transform;

/// The number of images in an epoch of random images.
const DUMMY: usize = 1000;

/// Opens the training images.
pub(super) fn train_images(found: &Found, config: &ImageConfig) -> anyhow::Result<Images> {
    let kind = found.kind;
    let transform = if config.train.augment { augmented(config, kind) } else { plain(config, kind) };
    open(found, Split::Train, transform, config)
}

/// Opens the test images.
pub(super) fn test_images(found: &Found, config: &ImageConfig) -> anyhow::Result<Images> {
    open(found, Split::Test, plain(config, found.kind), config)
}

fn open(found: &Found, split: Split, transform: Transform, config: &ImageConfig) -> anyhow::Result<Images> {
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

fn augmented(config: &ImageConfig, kind: DataKind) -> Transform {
    match kind {
        DataKind::Cifar10 | DataKind::Cifar100 => Transform::cifar_train(),
        DataKind::Dummy => plain(config, kind),
        _ => Transform::imagenet_train(config.train.im_size),
    }
}

fn plain(config: &ImageConfig, kind: DataKind) -> Transform {
    let size = config.train.im_size;
    match kind {
        DataKind::Cifar10 | DataKind::Cifar100 => Transform::cifar_test(),
        DataKind::Dummy => Transform::imagenet_test(size, size),
        _ => Transform::imagenet_test(config.test.im_size, size),
    }
}
