//! Synthetic images in CIFAR-10's binary format, for hosts without network access.
//!
//! The ten classes are shapes and patterns. Position, size, angle and colours are random, with lighting and noise on
//! top. Each class tends to one colour. A linear model learns little more than that tendency; a convolutional model
//! learns the shapes within minutes.

mod picture;

use std::fs;
use std::path::Path;

use crate::error::ZooError;
use drumline::data::{Sample, SampleRng};
use picture::Picture;

/// The class names, in the order of their labels.
pub const CLASSES: [&str; 10] =
    ["disc", "square", "triangle", "ring", "cross", "horizontal", "vertical", "diagonal", "checks", "dots"];

/// Writes `train` images in five files and `test` images in one, and the names of the classes.
///
/// The same seed gives the same bytes. An image does not depend on the number of images.
///
/// ```
/// use drumline_zoo::data::{Cifar, Split};
/// use drumline_zoo::transforms::Transform;
/// use drumline::data::Dataset;
/// use drumline_zoo::synth_cifar;
///
/// let folder = tempfile::tempdir()?;
/// synth_cifar::write(folder.path(), 100, 20, 42)?;
/// assert_eq!(Cifar::open(folder.path(), Split::Train, Transform::cifar_train())?.len(), 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(dir: &Path, train: usize, test: usize, seed: u64) -> Result<(), ZooError> {
    if train < TRAIN_FILES || test == 0 {
        return Err(ZooError::TooFewImages { train, test });
    }
    fs::create_dir_all(dir).map_err(|source| ZooError::WriteFile { path: dir.to_owned(), source })?;
    for file in 0..TRAIN_FILES {
        let (start, end) = (file * train / TRAIN_FILES, (file + 1) * train / TRAIN_FILES);
        let records: Vec<u8> = (start..end).flat_map(|index| record(seed, TRAIN, index)).collect();
        write_file(dir, &format!("data_batch_{}.bin", file + 1), &records)?;
    }
    let records: Vec<u8> = (0..test).flat_map(|index| record(seed, TEST, index)).collect();
    write_file(dir, "test_batch.bin", &records)?;
    write_file(dir, "batches.meta.txt", (CLASSES.join("\n") + "\n").as_bytes())
}

const TRAIN_FILES: usize = 5;

/// The random streams of the two splits, and of the order of classes.
const TRAIN: u64 = 0;
const TEST: u64 = 1;
const ORDER: u64 = 2;

/// Does not overwrite a file with other content, which may be a real dataset.
fn write_file(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), ZooError> {
    let path = dir.join(name);
    match fs::read(&path) {
        Ok(there) if there == bytes => return Ok(()),
        Ok(_) => return Err(ZooError::InTheWay { path }),
        Err(_) => {}
    }
    fs::write(&path, bytes).map_err(|source| ZooError::WriteFile { path, source })
}

/// The label and pixels of an image, as in the file.
fn record(seed: u64, part: u64, index: usize) -> Vec<u8> {
    let class = class(seed, part, index);
    let picture = Picture::draw(class, &mut Sample::new(seed, part, index).rng());
    std::iter::once(class as u8).chain(picture.bytes()).collect()
}

/// The class of an image. Each ten consecutive images have ten different classes in random order, so every second image
/// also covers all classes.
fn class(seed: u64, part: u64, index: usize) -> usize {
    let mut rng = Sample::new(seed, ORDER + part, index / CLASSES.len()).rng();
    let mut order: [usize; 10] = std::array::from_fn(|class| class);
    for place in (1..order.len()).rev() {
        order.swap(place, rng.below(place + 1));
    }
    order[index % CLASSES.len()]
}

/// A random number from `low` to `high`.
fn between(rng: &mut SampleRng, low: f32, high: f32) -> f32 {
    low + (high - low) * rng.uniform() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &Path, name: &str) -> Vec<u8> {
        fs::read(dir.join(name)).unwrap()
    }

    #[test]
    fn files_are_cifars_and_classes_are_balanced() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), 203, 50, 1).unwrap();
        let mut counts = [0; 10];
        let sizes: Vec<_> = (1..=5)
            .map(|file| {
                let bytes = read(folder.path(), &format!("data_batch_{file}.bin"));
                assert_eq!(bytes.len() % 3073, 0);
                bytes.chunks(3073).for_each(|record| counts[usize::from(record[0])] += 1);
                bytes.len() / 3073
            })
            .collect();
        assert_eq!(sizes, [40, 41, 40, 41, 41]);
        assert!(counts.iter().all(|count| (20..=21).contains(count)), "{counts:?}");
        assert_eq!(read(folder.path(), "test_batch.bin").len(), 50 * 3073);
        assert_eq!(read(folder.path(), "batches.meta.txt").split(|byte| *byte == b'\n').count(), 11);
    }

    #[test]
    fn the_seed_determines_the_bytes() {
        let folders = [1, 1, 2].map(|seed| {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), 20, 10, seed).unwrap();
            folder
        });
        let [first, again, other] = folders
            .each_ref()
            .map(|folder| [read(folder.path(), "data_batch_2.bin"), read(folder.path(), "test_batch.bin")]);
        assert!(first == again && first[0] != other[0] && first[1] != other[1]);
        let more = tempfile::tempdir().unwrap();
        write(more.path(), 40, 30, 1).unwrap();
        assert!(
            read(more.path(), "test_batch.bin").starts_with(&first[1]),
            "a larger dataset starts with the same images"
        );
        assert!(write(more.path(), 4, 1, 1).unwrap_err().to_string().contains("too few"));
    }

    #[test]
    fn every_other_image_sees_all_classes() {
        let even: std::collections::HashSet<_> = (0..100).map(|i| class(0, TRAIN, 2 * i)).collect();
        assert_eq!(even.len(), 10);
    }
}
