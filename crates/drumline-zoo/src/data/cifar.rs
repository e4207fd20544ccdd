//! CIFAR-10 and CIFAR-100 from their binary files, held in memory.
//!
//! ```text
//!   CIFAR-10    record of 3073 bytes:  label         │ 1024 red │ 1024 green │ 1024 blue   (32×32, rows from the top)
//!   CIFAR-100   record of 3074 bytes:  coarse │ fine │ …                                   the fine label is the class
//! ```

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::assemble::{self, Cause, Paint};
use super::on_device::Stock;
use crate::error::ZooError;
use crate::transforms::{Layout, Painter, Pixels, Size, Transform};
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::torch::TorchError;

/// CIFAR-10 or CIFAR-100.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CifarKind {
    /// Ten classes.
    Cifar10,
    /// A hundred classes, in twenty groups.
    Cifar100,
}

/// The split of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// The training set.
    Train,
    /// The test set.
    Test,
}

impl CifarKind {
    /// Detects which CIFAR is in a folder. One of its files is enough.
    pub fn detect(dir: &Path) -> Option<Self> {
        let is_there =
            |kind: &Self| [Split::Train, Split::Test].iter().any(|split| kind.folder(dir, *split).is_some());
        [Self::Cifar10, Self::Cifar100].into_iter().find(is_there)
    }

    /// The number of classes.
    pub fn num_classes(self) -> i64 {
        match self {
            Self::Cifar10 => 10,
            Self::Cifar100 => 100,
        }
    }

    /// The folder that contains the files of a split: `dir`, or the subfolder that the published archive creates.
    pub(crate) fn folder(self, dir: &Path, split: Split) -> Option<PathBuf> {
        let inner = match self {
            Self::Cifar10 => "cifar-10-batches-bin",
            Self::Cifar100 => "cifar-100-binary",
        };
        let has_file = |folder: &PathBuf| self.files(split).iter().any(|file| folder.join(file).is_file());
        [dir.to_owned(), dir.join(inner)].into_iter().find(has_file)
    }

    /// The file names of a split.
    pub(crate) fn files(self, split: Split) -> &'static [&'static str] {
        match (self, split) {
            (Self::Cifar10, Split::Train) => &[
                "data_batch_1.bin",
                "data_batch_2.bin",
                "data_batch_3.bin",
                "data_batch_4.bin",
                "data_batch_5.bin",
            ],
            (Self::Cifar10, Split::Test) => &["test_batch.bin"],
            (Self::Cifar100, Split::Train) => &["train.bin"],
            (Self::Cifar100, Split::Test) => &["test.bin"],
        }
    }

    /// The number of bytes before the pixels; the last of them is the class.
    fn label_bytes(self) -> usize {
        match self {
            Self::Cifar10 => 1,
            Self::Cifar100 => 2,
        }
    }

    fn record_bytes(self) -> usize {
        self.label_bytes() + PIXELS
    }
}

const SIZE: Size = Size::square(32);
const PIXELS: usize = 3 * SIZE.area();

/// The images of one split.
pub struct Cifar {
    kind: CifarKind,
    files: Vec<DataFile>,
    records: Vec<u8>,
    transform: Transform,
}

/// A file, and the index after its last image.
struct DataFile {
    path: PathBuf,
    end: usize,
}

impl Cifar {
    /// Opens a split of the CIFAR in a folder; see [`open_kind`](Self::open_kind).
    pub fn open(dir: &Path, split: Split, transform: Transform) -> Result<Self, ZooError> {
        let kind = CifarKind::detect(dir).ok_or_else(|| ZooError::NoCifar { path: dir.to_owned() })?;
        Self::open_kind(kind, dir, split, transform)
    }

    /// Reads the files of a split and checks them: complete records, labels in range, no truncated file.
    pub fn open_kind(
        kind: CifarKind,
        dir: &Path,
        split: Split,
        transform: Transform,
    ) -> Result<Self, ZooError> {
        let folder = kind.folder(dir, split).ok_or_else(|| ZooError::NoCifar { path: dir.to_owned() })?;
        let mut data = Self { kind, files: Vec::new(), records: Vec::new(), transform };
        for file in kind.files(split) {
            data.read(folder.join(file))?;
        }
        data.check_sizes()?;
        Ok(data)
    }

    /// CIFAR-10 or CIFAR-100.
    pub fn kind(&self) -> CifarKind {
        self.kind
    }

    fn read(&mut self, path: PathBuf) -> Result<(), ZooError> {
        let damaged = |what: String| ZooError::DamagedData { path: path.clone(), what };
        let bytes = std::fs::read(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => damaged("is missing".to_owned()),
            _ => ZooError::ReadFile { path: path.clone(), source },
        })?;
        let size = self.kind.record_bytes();
        if bytes.is_empty() || bytes.len() % size != 0 {
            return Err(damaged(format!(
                "has {} bytes, expected a multiple of {size}: it is cut short",
                bytes.len()
            )));
        }
        let label = |record: &[u8]| i64::from(record[self.kind.label_bytes() - 1]);
        let bad = |record: &[u8]| label(record) >= self.kind.num_classes();
        if let Some(record) = bytes.chunks_exact(size).position(bad) {
            let (label, classes) = (label(&bytes[record * size..]), self.kind.num_classes());
            return Err(damaged(format!(
                "has label {label} at image {record}, expected 0 to {}",
                classes - 1
            )));
        }
        self.records.extend_from_slice(&bytes);
        self.files.push(DataFile { path, end: self.records.len() / size });
        Ok(())
    }

    /// The files of a split have the same size, or differ by one image if the number does not divide evenly. A smaller
    /// file is truncated.
    fn check_sizes(&self) -> Result<(), ZooError> {
        let starts = std::iter::once(0).chain(self.files.iter().map(|file| file.end));
        let sizes: Vec<_> = self.files.iter().zip(starts).map(|(file, start)| file.end - start).collect();
        let most = sizes.iter().copied().max().unwrap_or_default();
        match sizes.iter().position(|size| size + 1 < most) {
            None => Ok(()),
            Some(short) => Err(ZooError::DamagedData {
                path: self.files[short].path.clone(),
                what: format!("has {} images, others {most}: it is cut short", sizes[short]),
            }),
        }
    }

    /// All images with their labels.
    pub(super) fn stock(&self) -> Option<Stock<'_>> {
        let pixels = |index| Pixels::new(self.record(index).1, SIZE, Layout::Planar);
        Some(Stock {
            size: SIZE,
            images: (0..self.len()).map(pixels).collect::<Option<_>>()?,
            labels: (0..self.len()).map(|index| self.label(index)).collect(),
            transform: &self.transform,
        })
    }

    fn record(&self, index: usize) -> (&[u8], &[u8]) {
        let size = self.kind.record_bytes();
        self.records[index * size..][..size].split_at(self.kind.label_bytes())
    }
}

impl Paint for Cifar {
    fn transform(&self) -> &Transform {
        &self.transform
    }

    fn label(&self, index: usize) -> i64 {
        i64::from(self.record(index).0[self.kind.label_bytes() - 1])
    }

    fn paint(&self, sample: Sample, painter: &mut Painter<'_>, out: &mut [f32]) -> Result<(), Cause> {
        let (_, bytes) = self.record(sample.index);
        let pixels = Pixels::new(bytes, SIZE, Layout::Planar).ok_or("a record of the wrong size")?;
        Ok(painter.paint(&pixels, &mut sample.rng(), out)?)
    }
}

impl Dataset for Cifar {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.records.len() / self.kind.record_bytes()
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        assemble::batch(self, samples)
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(crc32fast::hash(&self.records))
    }

    fn name(&self, index: usize) -> String {
        let file = self.files.partition_point(|file| file.end <= index);
        let start = file.checked_sub(1).map_or(0, |before| self.files[before].end);
        let name = self.files.get(file).and_then(|file| file.path.file_name()).unwrap_or_default();
        format!("image {} of {}", index - start, name.to_string_lossy())
    }

    fn pin_memory(&self, batch: ImageBatch) -> Result<ImageBatch, TorchError> {
        batch.pin_memory()
    }
}

impl std::fmt::Debug for Cifar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cifar").field("kind", &self.kind).field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
