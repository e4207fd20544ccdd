//! Data sets of images: CIFAR's binary files, folders as ImageNet's, and made-up input.
//!
//! ```text
//!   DIR/data_batch_1.bin … test_batch.bin     CIFAR-10       DIR/train/<class>/*.jpg, *.png    an image folder
//!   DIR/train.bin, test.bin                   CIFAR-100      DIR/val/<class>/…
//! ```
//! Each gives batches of f32 images, written in one pass from bytes (`transforms`).

mod assemble;
mod cifar;
mod decode;
mod dummy;
mod folder;

use std::path::Path;

pub use cifar::{Cifar, CifarKind, Split};
pub use dummy::Dummy;
pub use folder::ImageFolder;

use crate::error::ZooError;
use crate::transforms::Transform;
use drumline::{Dataset, ImageBatch, Sample, SampleError};

/// Any of the data sets.
#[derive(Debug)]
pub enum Images {
    /// CIFAR-10 or CIFAR-100.
    Cifar(Cifar),
    /// A folder of images.
    Folder(ImageFolder),
    /// Made-up input.
    Dummy(Dummy),
}

impl Images {
    /// Open what lies in `dir`: CIFAR's files if they are there, otherwise the folder `split` of images.
    pub fn open(dir: &Path, split: &str, transform: Transform) -> Result<Self, ZooError> {
        match CifarKind::detect(dir) {
            Some(_) => {
                let split = if split == "train" { Split::Train } else { Split::Test };
                Ok(Self::Cifar(Cifar::open(dir, split, transform)?))
            }
            None => Ok(Self::Folder(ImageFolder::open(&dir.join(split), transform)?)),
        }
    }

    /// How many classes there are.
    pub fn num_classes(&self) -> i64 {
        match self {
            Self::Cifar(data) => data.kind().num_classes(),
            Self::Folder(data) => data.classes().len() as i64,
            Self::Dummy(data) => data.num_classes(),
        }
    }

    /// Refuse a model with another number of classes; `dir` is for the message.
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
        }
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        match self {
            Self::Cifar(data) => data.batch(samples),
            Self::Folder(data) => data.batch(samples),
            Self::Dummy(data) => data.batch(samples),
        }
    }

    fn name(&self, index: usize) -> String {
        match self {
            Self::Cifar(data) => data.name(index),
            Self::Folder(data) => data.name(index),
            Self::Dummy(data) => data.name(index),
        }
    }
}
