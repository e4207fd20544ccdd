//! Batches of images for one rank: CIFAR's binary files, or random images.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use drumline::ProcessGroup;
use tch::{Device, Kind, Tensor};

use crate::config::DataKind;
use crate::program::checked::Checked;
use crate::program::data_kind::Found;

const PIXELS: usize = 3 * 32 * 32;
const MEAN: [f32; 3] = [0.4914, 0.4822, 0.4465];
const STD: [f32; 3] = [0.2023, 0.1994, 0.2010];
/// Length of the data set that does not exist.
const DUMMY: usize = 1000;

pub(in crate::program) struct ImageBatch {
    pub(in crate::program) images: Tensor,
    pub(in crate::program) labels: Tensor,
}

struct Images {
    pixels: Tensor,
    labels: Tensor,
    device: Device,
}

impl Images {
    fn open(found: &Found, files: &[String], checked: &Checked, device: Device) -> anyhow::Result<Self> {
        let classes = checked.config.model.num_classes;
        match found.kind {
            DataKind::Cifar10 => Self::cifar(&found.folder, files, classes, device),
            DataKind::Dummy => {
                let side = checked.config.train.im_size as i64;
                let pixels = Tensor::randint(256, [DUMMY as i64, 3, side, side], (Kind::Uint8, Device::Cpu));
                let labels = Tensor::randint(classes as i64, [DUMMY as i64], (Kind::Int64, Device::Cpu));
                Ok(Self { pixels, labels, device })
            }
            other => bail!("data sets of kind {} cannot be read by this build", other.name()),
        }
    }

    fn cifar(folder: &Path, files: &[String], classes: usize, device: Device) -> anyhow::Result<Self> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for file in files {
            let path = folder.join(file);
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let rest = bytes.len() % (PIXELS + 1);
            ensure!(
                rest == 0 && !bytes.is_empty(),
                "{} is cut off: {} bytes are no whole number of images of {}",
                path.display(),
                bytes.len(),
                PIXELS + 1
            );
            for (index, image) in bytes.chunks(PIXELS + 1).enumerate() {
                let label = usize::from(image[0]);
                ensure!(
                    label < classes,
                    "{}, image {index}: label {label}, but MODEL.NUM_CLASSES is {classes}",
                    path.display()
                );
                labels.push(label as i64);
                pixels.extend_from_slice(&image[1..]);
            }
        }
        let count = labels.len() as i64;
        let pixels = Tensor::from_slice(&pixels).view([count, 3, 32, 32]);
        Ok(Self { pixels, labels: Tensor::from_slice(&labels), device })
    }

    fn len(&self) -> usize {
        self.labels.size()[0] as usize
    }

    fn batch(&self, indices: &[i64]) -> anyhow::Result<ImageBatch> {
        let indices = Tensor::from_slice(indices);
        let pixels = self.pixels.f_index_select(0, &indices)?.to_kind(Kind::Float) / 255.0;
        let mean = Tensor::from_slice(&MEAN).view([1, 3, 1, 1]);
        let std = Tensor::from_slice(&STD).view([1, 3, 1, 1]);
        let images = ((pixels - mean) / std).to_device(self.device);
        Ok(ImageBatch { images, labels: self.labels.f_index_select(0, &indices)?.to_device(self.device) })
    }
}

pub(in crate::program) struct TrainLoader {
    images: Arc<Images>,
    batch_size: usize,
    shuffle: bool,
    seed: u64,
    world_size: usize,
    rank: usize,
}

impl TrainLoader {
    pub(in crate::program) fn new(
        checked: &Checked,
        group: &ProcessGroup,
        seed: u64,
        device: Device,
    ) -> anyhow::Result<Self> {
        let mut files: Vec<_> = (1..=5).map(|number| format!("data_batch_{number}.bin")).collect();
        files.retain(|file| checked.train.folder.join(file).exists());
        let images = Arc::new(Images::open(&checked.train, &files, checked, device)?);
        let train = &checked.config.train;
        let (batch_size, shuffle) = (train.batch_size, train.shuffle);
        Ok(Self { images, batch_size, shuffle, seed, world_size: group.size(), rank: group.rank() })
    }

    /// Batches of an epoch, for each rank.
    pub(in crate::program) fn num_batches(&self) -> u64 {
        self.images.len().div_ceil(self.world_size).div_ceil(self.batch_size) as u64
    }

    /// This rank's batches, from the one after `done`.
    pub(in crate::program) fn epoch(
        &self,
        epoch: u64,
        done: u64,
    ) -> impl Iterator<Item = anyhow::Result<ImageBatch>> + use<> {
        self.epoch_of(self.rank, epoch, done)
    }

    /// Another rank's batches, which are the same wherever they are loaded.
    pub(in crate::program) fn epoch_of(
        &self,
        rank: usize,
        epoch: u64,
        done: u64,
    ) -> impl Iterator<Item = anyhow::Result<ImageBatch>> + use<> {
        let indices = self.indices(rank, epoch);
        let (images, size) = (Arc::clone(&self.images), self.batch_size);
        (done as usize..indices.len().div_ceil(size)).map(move |batch| {
            let end = indices.len().min((batch + 1) * size);
            images.batch(&indices[batch * size..end])
        })
    }

    fn indices(&self, rank: usize, epoch: u64) -> Vec<i64> {
        let mut order: Vec<_> = (0..self.images.len() as i64).collect();
        if self.shuffle {
            shuffle(&mut order, self.seed ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        let share = order.len().div_ceil(self.world_size);
        (0..share).map(|place| order[(place * self.world_size + rank) % order.len()]).collect()
    }

    /// Samples of all ranks in so many steps of an epoch.
    pub(in crate::program) fn samples_seen(&self, steps: u64) -> u64 {
        steps * (self.batch_size * self.world_size) as u64
    }

    /// The way back: whole steps in so many samples of all ranks.
    pub(in crate::program) fn steps_of(&self, samples: u64) -> u64 {
        samples / (self.batch_size * self.world_size) as u64
    }
}

pub(in crate::program) struct TestLoader {
    images: Arc<Images>,
    batch_size: usize,
    world_size: usize,
    rank: usize,
}

impl TestLoader {
    pub(in crate::program) fn new(
        checked: &Checked,
        group: &ProcessGroup,
        device: Device,
    ) -> anyhow::Result<Self> {
        let images = Arc::new(Images::open(&checked.test, &["test_batch.bin".into()], checked, device)?);
        let batch_size = checked.config.test.batch_size;
        Ok(Self { images, batch_size, world_size: group.size(), rank: group.rank() })
    }

    /// This rank's share, each sample once over all ranks.
    pub(in crate::program) fn epoch(&self) -> impl Iterator<Item = anyhow::Result<ImageBatch>> {
        let indices: Vec<_> =
            (self.rank..self.images.len()).step_by(self.world_size).map(|i| i as i64).collect();
        let batches: Vec<_> = indices.chunks(self.batch_size).map(<[i64]>::to_vec).collect();
        batches.into_iter().map(|batch| self.images.batch(&batch))
    }
}

/// Images whose class is the place of a bright stripe, in noise.
pub(in crate::program) fn synth_cifar(
    folder: &Path,
    train: usize,
    test: usize,
    seed: u64,
) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut image = |label: usize, bytes: &mut Vec<u8>| {
        bytes.push(label as u8);
        for pixel in 0..PIXELS {
            let noise = (next(&mut state) % 96) as u8;
            let lit = (pixel % 32) / 3 == label;
            bytes.push(if lit { 160 + noise / 2 } else { noise });
        }
    };
    let mut write = |name: &str, count: usize| {
        let mut bytes = Vec::with_capacity(count * (PIXELS + 1));
        (0..count).for_each(|index| image(index % 10, &mut bytes));
        let path = folder.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    for part in 0..5 {
        let count = train / 5 + usize::from(part < train % 5);
        if count > 0 {
            write(&format!("data_batch_{}.bin", part + 1), count)?;
        }
    }
    write("test_batch.bin", test)
}

fn shuffle(order: &mut [i64], seed: u64) {
    let mut state = seed;
    for end in (1..order.len()).rev() {
        let other = next(&mut state) % (end as u64 + 1);
        order.swap(end, other as usize);
    }
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
