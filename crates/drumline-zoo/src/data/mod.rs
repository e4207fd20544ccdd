//! Image datasets: CIFAR's binary files, folders as in ImageNet, and random images.
//!
//! ```text
//!   DIR/data_batch_1.bin … test_batch.bin     CIFAR-10       DIR/train/<class>/*.jpg, *.png    an image folder
//!   DIR/train.bin, test.bin                   CIFAR-100      DIR/val/<class>/…
//! ```
//! Each dataset makes batches of f32 images in one pass from bytes (`transforms`). Images of one size can be stored on
//! a GPU and made into batches there (`on_device`).

mod assemble;
mod cifar;
mod decode;
mod dummy;
mod folder;
mod on_device;

use std::path::Path;

pub use cifar::{Cifar, CifarKind, Split};
pub use dummy::Dummy;
pub use folder::ImageFolder;
pub use on_device::{BatchLayout, OnDevice};

use crate::error::ZooError;
use crate::transforms::Transform;
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::torch::TorchError;
use on_device::Stock;

/// Any image dataset.
#[derive(Debug)]
pub enum Images {
    /// CIFAR-10 or CIFAR-100.
    Cifar(Cifar),
    /// A folder of images.
    Folder(ImageFolder),
    /// Random images.
    Dummy(Dummy),
    /// A dataset whose images are stored on a device.
    OnDevice(OnDevice),
}

impl Images {
    /// Opens the dataset in `dir`: CIFAR's files if they exist, otherwise the image folder `split`.
    pub fn open(dir: &Path, split: &str, transform: Transform) -> Result<Self, ZooError> {
        match CifarKind::detect(dir) {
            Some(_) => {
                let split = if split == "train" { Split::Train } else { Split::Test };
                Ok(Self::Cifar(Cifar::open(dir, split, transform)?))
            }
            None => Ok(Self::Folder(ImageFolder::open(&dir.join(split), transform)?)),
        }
    }

    /// The number of classes.
    pub fn num_classes(&self) -> i64 {
        match self {
            Self::Cifar(data) => data.kind().num_classes(),
            Self::Folder(data) => data.classes().len() as i64,
            Self::Dummy(data) => data.num_classes(),
            Self::OnDevice(data) => data.source().num_classes(),
        }
    }

    /// The images, if they can be stored on a device: they must have one size, and only be cropped and flipped.
    fn stock(&self) -> Option<Stock<'_>> {
        let stock = match self {
            Self::Cifar(data) => data.stock()?,
            Self::Dummy(data) => data.stock()?,
            Self::Folder(_) | Self::OnDevice(_) => return None,
        };
        Some(stock).filter(|stock| !stock.transform.geometry.resizes(stock.size))
    }

    /// Returns an error if the model has another number of classes. `dir` is for the message.
    pub fn check_classes(&self, model: i64, dir: &Path) -> Result<(), ZooError> {
        match self.num_classes() {
            found if found == model => Ok(()),
            found => Err(ZooError::DataClasses { path: dir.to_owned(), found, expected: model }),
        }
    }
}

impl Dataset for Images {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        match self {
            Self::Cifar(data) => data.len(),
            Self::Folder(data) => data.len(),
            Self::Dummy(data) => data.len(),
            Self::OnDevice(data) => data.len(),
        }
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        match self {
            Self::Cifar(data) => data.batch(samples),
            Self::Folder(data) => data.batch(samples),
            Self::Dummy(data) => data.batch(samples),
            Self::OnDevice(data) => data.batch(samples),
        }
    }

    fn pin_memory(&self, batch: ImageBatch) -> Result<ImageBatch, TorchError> {
        batch.pin_memory()
    }

    fn name(&self, index: usize) -> String {
        match self {
            Self::Cifar(data) => data.name(index),
            Self::Folder(data) => data.name(index),
            Self::Dummy(data) => data.name(index),
            Self::OnDevice(data) => data.name(index),
        }
    }

    fn fingerprint(&self) -> Option<u32> {
        match self {
            Self::Cifar(data) => data.fingerprint(),
            Self::Folder(data) => data.fingerprint(),
            Self::Dummy(data) => data.fingerprint(),
            Self::OnDevice(data) => data.fingerprint(),
        }
    }

    fn is_on_device(&self) -> bool {
        matches!(self, Self::OnDevice(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth_cifar;

    #[test]
    fn a_dataset_is_detected_and_its_classes_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let missing = Images::open(dir, "val", Transform::cifar_test()).unwrap_err().to_string();
        assert!(missing.contains("val"), "{missing}");
        synth_cifar::write(dir, 10, 7, 1).unwrap();
        let [train, test] =
            ["train", "val"].map(|split| Images::open(dir, split, Transform::cifar_test()).unwrap());
        assert_eq!((train.len(), test.len(), test.num_classes()), (10, 7, 10));
        test.check_classes(10, dir).unwrap();
        let refused = test.check_classes(1000, dir).unwrap_err().to_string();
        assert!(refused.contains("10 classes, the model 1000; try MODEL.NUM_CLASSES 10"), "{refused}");
    }
}
