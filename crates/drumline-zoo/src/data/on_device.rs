//! Stores images of one size as bytes on the network's device, and makes batches there.
//!
//! ```text
//!   host     draws the window of each sample ─▶ a place for each row and column of the batch ─┐ one small copy
//!   device   bytes of all images ─▶ gathered by row + column ─▶ normalised by table ─▶ batch  ◀┘
//! ```
//! A *place* counts pixels over all images, from 1. Place 0 is a black pixel, which stands for everything beyond an
//! image's edge. The same function draws the windows as on the CPU, and values come from the same table, so a batch has
//! the same bits on either device. `images/placing.rs` decides whether the images fit.

use std::sync::{Mutex, PoisonError};

use drumline_torch::cuda::pinned;
use tch::{Device, Kind, Tensor};

use super::Images;
use crate::error::ZooError;
use crate::transforms::{Pixels, Size, Transform, Window};
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::torch::TorchError;

/// The place of a row or column beyond the edge: the sum with any other place stays negative.
const BEYOND: i64 = i64::MIN / 4;

/// The memory layout of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchLayout {
    /// NCHW: one channel after the other.
    Contiguous,
    /// NHWC: all channels of a pixel together, as they are gathered.
    ChannelsLast,
}

/// Images that can be stored on a device: their pixels, labels and transform.
pub(super) struct Stock<'a> {
    /// The size of every image.
    pub(super) size: Size,
    /// The images. If there are fewer images than samples, they repeat.
    pub(super) images: Vec<Pixels<'a>>,
    pub(super) labels: Vec<i64>,
    pub(super) transform: &'a Transform,
}

impl Stock<'_> {
    fn bytes(&self) -> u64 {
        (3 * self.size.area() * self.images.len()) as u64
    }

    /// All pixels as RGB, after a black one.
    fn pixels(&self) -> Vec<u8> {
        let mut pixels = Vec::with_capacity(self.bytes() as usize + 3);
        pixels.extend([0; 3]);
        self.images.iter().for_each(|image| pixels.extend(image.interleaved()));
        pixels
    }
}

/// A dataset stored on a device. Batches are made on the caller's stream.
pub struct OnDevice {
    /// The original dataset, for names and classes.
    source: Box<Images>,
    size: Size,
    num_images: usize,
    labels: Vec<i64>,
    transform: Transform,
    layout: BatchLayout,
    device: Device,
    /// A mutex, because only one thread may use a tensor at a time.
    resident: Mutex<Resident>,
}

/// The tensors that stay on the device.
struct Resident {
    /// The pixels: u8 `[places, 3]`.
    pixels: Tensor,
    /// The table of normalised values of each byte, for red, green and blue.
    table: Tensor,
    /// The offset of each channel in the table.
    channels: Tensor,
}

impl Images {
    /// The number of bytes that the images need on a device; `None` if they cannot be stored there because their sizes
    /// differ.
    pub fn bytes_on_device(&self) -> Option<u64> {
        self.stock().map(|stock| stock.bytes())
    }

    /// Moves the images to a device. Batches are the same to the bit.
    pub fn on_device(self, device: Device, layout: BatchLayout) -> Result<Self, ZooError> {
        let Some(stock) = self.stock() else {
            return Err(ZooError::Unsuitable {
                what: "images that are resized, or differ in their sizes, cannot be kept on a device".into(),
                fix: "DATA.ON_DEVICE auto".into(),
            });
        };
        let resident = Mutex::new(Resident::new(&stock, device)?);
        let (size, num_images, transform) = (stock.size, stock.images.len(), stock.transform.clone());
        let (labels, source) = (stock.labels, Box::new(self));
        Ok(Self::OnDevice(OnDevice { source, size, num_images, labels, transform, layout, device, resident }))
    }
}

impl Resident {
    /// Copies the images and waits for the copies, so that any stream may read them.
    fn new(stock: &Stock<'_>, device: Device) -> Result<Self, TorchError> {
        let numbers: Vec<f32> =
            (0..3).flat_map(|channel| *stock.transform.normalize.table(channel)).collect();
        Ok(Self {
            pixels: Tensor::f_from_slice(&stock.pixels())?.f_view([-1, 3])?.f_to_device(device)?,
            table: Tensor::f_from_slice(&numbers)?.f_to_device(device)?,
            channels: Tensor::f_from_slice(&[0i64, 256, 512])?.f_to_device(device)?,
        })
    }

    /// The images at these rows and columns: f32 `[samples, 3, side, side]`, channels-last in memory.
    fn gathered(&self, rows: &Tensor, columns: &Tensor) -> Result<Tensor, TorchError> {
        let (samples, side) = rows.size2()?;
        let places = rows.f_unsqueeze(2)?.f_add(&columns.f_unsqueeze(1)?)?.f_clamp_min_(0)?;
        let bytes = self.pixels.f_index_select(0, &places.f_view([samples * side * side])?)?;
        let numbers = self.table.f_take(&self.channels.f_add(&bytes)?)?;
        Ok(numbers.f_view([samples, side, side, 3])?.f_permute([0, 3, 1, 2])?)
    }
}

/// The places of a batch, computed on the host.
#[derive(Default)]
struct Places {
    rows: Vec<i64>,
    columns: Vec<i64>,
}

impl Places {
    /// Adds the window of an image whose first pixel is at place `first`.
    fn add(&mut self, window: &Window, first: usize, Size { width, height }: Size) {
        let within = |at: isize, side: usize| usize::try_from(at).ok().filter(|at| *at < side);
        for row in 0..window.size {
            let row = within(window.top + row as isize, height);
            self.rows.push(row.map_or(BEYOND, |row| (first + row * width) as i64));
        }
        for column in 0..window.size {
            let column = if window.mirrored { window.size - 1 - column } else { column };
            let column = within(window.left + column as isize, width);
            self.columns.push(column.map_or(BEYOND, |column| column as i64));
        }
    }
}

impl OnDevice {
    /// The device of the images.
    pub fn device(&self) -> Device {
        self.device
    }

    pub(super) fn source(&self) -> &Images {
        &self.source
    }

    fn places(&self, samples: &[Sample]) -> Result<Places, SampleError> {
        let mut places = Places::default();
        for sample in samples {
            let window = self
                .transform
                .window(self.size, &mut sample.rng())
                .map_err(|cause| SampleError::new(sample.index, self.name(sample.index), cause))?;
            let image = sample.index % self.num_images;
            places.add(&window, 1 + image * self.size.area(), self.size);
        }
        Ok(places)
    }

    fn made(&self, places: &Places, labels: &[i64]) -> Result<(Tensor, Tensor), TorchError> {
        let (samples, side) = (labels.len() as i64, self.transform.geometry.size() as i64);
        let all = self.uploaded(&[&places.rows, &places.columns, labels].concat())?;
        let part = |number: i64| all.f_narrow(0, number * samples * side, samples * side);
        let [rows, columns] = [part(0)?, part(1)?];
        let [rows, columns] = [rows.f_view([samples, side])?, columns.f_view([samples, side])?];
        let resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let images = resident.gathered(&rows, &columns)?;
        let images = match self.layout {
            BatchLayout::ChannelsLast => images,
            BatchLayout::Contiguous => images.f_contiguous()?,
        };
        Ok((images, all.f_narrow(0, 2 * samples * side, samples)?))
    }

    /// Copies from pinned memory, which does not block the host.
    fn uploaded(&self, numbers: &[i64]) -> Result<Tensor, TorchError> {
        let numbers = Tensor::f_from_slice(numbers)?;
        match self.device {
            Device::Cpu => Ok(numbers),
            device => Ok(pinned(&numbers)?.f_to_device_(device, Kind::Int64, true, false)?),
        }
    }
}

impl Dataset for OnDevice {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.labels.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        let indices: Vec<_> = samples.iter().map(|sample| sample.index).collect();
        let labels: Vec<_> = indices.iter().map(|index| self.labels[*index]).collect();
        let (images, labels) = self.made(&self.places(samples)?, &labels).map_err(|error| {
            SampleError::new(indices.first().copied().unwrap_or_default(), "a whole batch", error)
        })?;
        Ok(ImageBatch { images, labels, indices })
    }

    fn fingerprint(&self) -> Option<u32> {
        self.source.fingerprint()
    }

    fn name(&self, index: usize) -> String {
        self.source.name(index)
    }

    fn is_on_device(&self) -> bool {
        true
    }
}

impl std::fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnDevice")
            .field("source", &self.source)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Cifar, CifarKind, Dummy, Split};
    use crate::synth_cifar;
    use crate::transforms::{Flip, Geometry, Normalize};
    use drumline::data::{DistributedSampler, Loader, LoaderOptions, SamplerOptions};

    fn cifar(transform: &Transform) -> (Images, Images) {
        let folder = tempfile::tempdir().unwrap();
        synth_cifar::write(folder.path(), 60, 5, 1).unwrap();
        let open = || Cifar::open_kind(CifarKind::Cifar10, folder.path(), Split::Train, transform.clone());
        (Images::Cifar(open().unwrap()), Images::Cifar(open().unwrap()))
    }

    /// Compares sample by sample, in several epochs and layouts.
    fn same(host: &Images, device: Images, layout: BatchLayout) {
        let device = device.on_device(Device::Cpu, layout).unwrap();
        assert_eq!((device.len(), device.num_classes()), (host.len(), host.num_classes()));
        for epoch in 0..4 {
            let indices = (0..host.len()).rev().chain([0, 0]);
            let samples: Vec<_> = indices.map(|index| Sample::new(7, epoch, index)).collect();
            let (a, b) = (host.batch(&samples).unwrap(), device.batch(&samples).unwrap());
            assert_eq!((a.images.size(), a.images.kind()), (b.images.size(), b.images.kind()));
            assert_eq!((&a.indices, &a.labels), (&b.indices, &b.labels));
            for (place, sample) in samples.iter().enumerate() {
                let [a, b] = [&a, &b].map(|batch| batch.images.get(place as i64));
                assert_eq!(a, b, "{sample:?} of epoch {epoch}");
            }
            let is_last = b.images.stride()[1] == 1;
            assert_eq!(is_last, layout == BatchLayout::ChannelsLast);
        }
    }

    #[test]
    fn batches_equal_those_of_the_cpu_to_the_bit() {
        let crop = |geometry, flip| Transform { geometry, flip, normalize: Normalize::imagenet() };
        for transform in [
            Transform::cifar_train(),
            Transform::cifar_test(),
            crop(Geometry::RandomCrop { size: 24, padding: 0 }, Flip::Random),
            crop(Geometry::RandomCrop { size: 40, padding: 9 }, Flip::Random),
            crop(Geometry::CenterCrop { resize: None, size: 45 }, Flip::Random),
            crop(Geometry::CenterCrop { resize: Some(32), size: 7 }, Flip::Never),
        ] {
            for layout in [BatchLayout::Contiguous, BatchLayout::ChannelsLast] {
                let (host, device) = cifar(&transform);
                same(&host, device, layout);
            }
        }
    }

    #[test]
    fn samples_differ_from_epoch_to_epoch() {
        let (_, images) = cifar(&Transform::cifar_train());
        let images = images.on_device(Device::Cpu, BatchLayout::Contiguous).unwrap();
        let of = |epoch| {
            let samples: Vec<_> = (0..20).map(|index| Sample::new(7, epoch, index)).collect();
            images.batch(&samples).unwrap().images
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2), "control: the comparison sees differences");
    }

    #[test]
    fn random_images_are_the_same_too() {
        let dummy = || Images::Dummy(Dummy::new(50, 3, Transform::imagenet_test(20, 20)));
        same(&dummy(), dummy(), BatchLayout::ChannelsLast);
    }

    #[test]
    fn images_of_different_sizes_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("train/cat")).unwrap();
        image::RgbImage::new(4, 4).save(folder.path().join("train/cat/a.png")).unwrap();
        let images = Images::open(folder.path(), "train", Transform::imagenet_train(8)).unwrap();
        assert_eq!(images.bytes_on_device(), None);
        let refused = images.on_device(Device::Cpu, BatchLayout::Contiguous).unwrap_err().to_string();
        assert!(
            refused.contains("differ in their sizes") && refused.contains("try DATA.ON_DEVICE auto"),
            "{refused}"
        );
        let (resized, _) = cifar(&Transform::imagenet_train(8));
        assert_eq!(resized.bytes_on_device(), None, "only the CPU resizes");
        let (fits, _) = cifar(&Transform::cifar_train());
        assert_eq!(fits.bytes_on_device(), Some(60 * 3 * 32 * 32));
    }

    #[test]
    fn a_loader_works_without_workers_and_resumes_at_its_position() {
        let (host, device) = cifar(&Transform::cifar_train());
        let device = device.on_device(Device::Cpu, BatchLayout::Contiguous).unwrap();
        let options = LoaderOptions { batch_size: 7, workers: 3, pin_memory: true, ..Default::default() };
        let loader = |images: Images| {
            let sampler = SamplerOptions { num_samples: 60, num_replicas: 2, rank: 1, ..Default::default() };
            Loader::new(images, DistributedSampler::new(sampler).unwrap(), options).unwrap()
        };
        let (host, device) = (loader(host), loader(device));
        assert_eq!((host.options().workers, device.options().workers), (3, 0));
        let mut first = device.epoch(5);
        let begun: Vec<_> = first.by_ref().take(2).map(|batch| batch.unwrap().images).collect();
        let rest = device.resume(first.sampler_position()).unwrap().map(|batch| batch.unwrap().images);
        let all: Vec<_> = host.epoch(5).map(|batch| batch.unwrap().images).collect();
        assert_eq!(begun.into_iter().chain(rest).collect::<Vec<_>>(), all);
    }
}
