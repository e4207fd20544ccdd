//! A folder of images with a subfolder for each class, as in ImageNet.
//!
//! Classes are the names of the subfolders in sorted order. The images of a class are all JPEG and PNG files under its
//! folder, sorted. This is the order of torchvision's `ImageFolder`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::assemble::{self, Cause, Paint};
use super::decode::decode;
use crate::error::ZooError;
use crate::transforms::{Layout, Painter, Pixels, Size, Transform};
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::torch::TorchError;

/// The images of a folder. Files are read when they are needed.
pub struct ImageFolder {
    classes: Vec<String>,
    images: Vec<(PathBuf, usize)>,
    /// The checksum of the relative paths.
    fingerprint: u32,
    transform: Transform,
}

impl ImageFolder {
    /// Lists the images. A class without images is an error, because class numbers would differ from those on a host
    /// that has some.
    pub fn open(dir: &Path, transform: Transform) -> Result<Self, ZooError> {
        let mut folders: Vec<_> = list(dir)?.into_iter().filter(|path| path.is_dir()).collect();
        folders.sort();
        if folders.is_empty() {
            return Err(ZooError::NoClasses { path: dir.to_owned() });
        }
        let mut data = Self { classes: Vec::new(), images: Vec::new(), fingerprint: 0, transform };
        for (class, folder) in folders.into_iter().enumerate() {
            let images = images_under(&folder)?;
            if images.is_empty() {
                return Err(ZooError::EmptyClass { path: folder });
            }
            data.images.extend(images.into_iter().map(|path| (path, class)));
            data.classes.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        data.fingerprint = fingerprint(dir, &data.images);
        Ok(data)
    }

    /// The names of the classes; a label is an index into this list.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }
}

/// A checksum of the file names. The contents are not included, because reading them takes as long as an epoch.
fn fingerprint(dir: &Path, images: &[(PathBuf, usize)]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    for (path, _) in images {
        crc.update(path.strip_prefix(dir).unwrap_or(path).as_os_str().as_encoded_bytes());
        crc.update(b"\0");
    }
    crc.finalize()
}

fn list(dir: &Path) -> Result<Vec<PathBuf>, ZooError> {
    let failed = |source| ZooError::ReadFile { path: dir.to_owned(), source };
    let entries = fs::read_dir(dir).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
}

/// All images under a folder: by folder, then by name.
fn images_under(dir: &Path) -> Result<Vec<PathBuf>, ZooError> {
    let (mut folders, mut images) = (vec![dir.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in list(&folder)? {
            if is_image(&path) {
                images.push(path);
            } else if path.is_dir() {
                folders.push(path);
            }
        }
    }
    let place = |path: &PathBuf| (path.parent().map(PathBuf::from), path.file_name().map(OsString::from));
    images.sort_by_cached_key(place);
    Ok(images)
}

fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    ["jpg", "jpeg", "png"].iter().any(|known| extension.eq_ignore_ascii_case(known))
}

impl Paint for ImageFolder {
    fn transform(&self) -> &Transform {
        &self.transform
    }

    fn label(&self, index: usize) -> i64 {
        self.images[index].1 as i64
    }

    fn paint(&self, sample: Sample, painter: &mut Painter<'_>, out: &mut [f32]) -> Result<(), Cause> {
        let image = decode(&self.images[sample.index].0)?;
        let size = Size { width: image.width() as usize, height: image.height() as usize };
        let pixels =
            Pixels::new(image.as_raw(), size, Layout::Interleaved).ok_or("an image of the wrong size")?;
        Ok(painter.paint(&pixels, &mut sample.rng(), out)?)
    }
}

impl Dataset for ImageFolder {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.images.len()
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        assemble::batch(self, samples)
    }

    fn fingerprint(&self) -> Option<u32> {
        Some(self.fingerprint)
    }

    fn name(&self, index: usize) -> String {
        self.images[index].0.display().to_string()
    }

    fn pin_memory(&self, batch: ImageBatch) -> Result<ImageBatch, TorchError> {
        batch.pin_memory()
    }
}

impl std::fmt::Debug for ImageFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (classes, images) = (self.classes.len(), self.images.len());
        f.debug_struct("ImageFolder")
            .field("classes", &classes)
            .field("images", &images)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/oracle/golden");

    fn copy(from: &str, to: PathBuf) {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(format!("{GOLDEN}/{from}"), to).unwrap();
    }

    fn samples(count: usize) -> Vec<Sample> {
        (0..count).map(|index| Sample::new(1, 0, index)).collect()
    }

    #[test]
    fn classes_and_images_are_sorted_and_decoded() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        for name in ["b/2.JPG", "b/10.jpg", "b/sub/0.jpeg"] {
            copy("image_resize_photo.jpg", dir.join(name));
        }
        copy("image_resize.png", dir.join("a/x.png"));
        fs::write(dir.join("b/notes.txt"), "no image").unwrap();
        let data = ImageFolder::open(dir, Transform::imagenet_test(30, 24)).unwrap();
        assert_eq!(data.classes(), ["a", "b"]);
        let names: Vec<_> = (0..4).map(|index| data.name(index)).collect();
        let expected = ["a/x.png", "b/10.jpg", "b/2.JPG", "b/sub/0.jpeg"]
            .map(|name| dir.join(name).display().to_string());
        assert_eq!(names, expected);
        let batch = data.batch(&samples(4)).unwrap();
        assert_eq!(batch.images.size(), [4, 3, 24, 24]);
        assert_eq!(Vec::<i64>::try_from(&batch.labels).unwrap(), [0, 1, 1, 1]);
        let apart =
            (batch.images.get(0) - batch.images.get(1)).abs().mean(tch::Kind::Float).double_value(&[]);
        assert!(apart > 0.0 && apart < 0.2, "the JPEG looks like the PNG: {apart}");
    }

    #[test]
    fn jpegs_are_decoded_as_by_pil() {
        let text = fs::read(format!("{GOLDEN}/image_resize.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let expected: Vec<u8> = serde_json::from_value(golden["decoded"].clone()).unwrap();
        let image = decode(Path::new(&format!("{GOLDEN}/image_resize_photo.jpg"))).unwrap();
        let apart = image.as_raw().iter().zip(&expected).map(|(a, b)| a.abs_diff(*b));
        let (most, sum) = apart.fold((0, 0u32), |(most, sum), x| (x.max(most), sum + u32::from(x)));
        assert!(most <= 6 && sum < expected.len() as u32, "furthest {most}, sum {sum} of {}", expected.len());
    }

    #[test]
    fn damaged_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let refused = || ImageFolder::open(dir, Transform::imagenet_train(24)).unwrap_err().to_string();
        assert!(refused().contains("no class folders"), "{}", refused());
        fs::create_dir(dir.join("cat")).unwrap();
        assert!(refused().contains("cat") && refused().contains("no JPEG or PNG"), "{}", refused());
        let missing =
            ImageFolder::open(&dir.join("val"), Transform::imagenet_train(24)).unwrap_err().to_string();
        assert!(missing.contains("cannot read") && missing.contains("val"), "{missing}");

        let whole = fs::read(format!("{GOLDEN}/image_resize_photo.jpg")).unwrap();
        let png = fs::read(format!("{GOLDEN}/image_resize.png")).unwrap();
        let file = dir.join("cat/1.jpg");
        // The decoder trusts the width and height in the frame header.
        let mut large = whole.clone();
        let frame = large.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
        large[frame + 5..frame + 9].copy_from_slice(&[0x75, 0x30, 0x75, 0x30]);
        for (bytes, words) in [
            (
                &large[..],
                "the image has 30000 x 30000 pixels, 2574 MiB, and the limit is 512 MiB; try a smaller copy",
            ),
            (&whole[..whole.len() / 2], "cut short"),
            (&whole[..10], "cut short"),
            (&png[..png.len() / 2], "try to fetch it again"),
            (&b"GIF89a..."[..], "neither JPEG nor PNG"),
            (&[], "empty"),
        ] {
            fs::write(&file, bytes).unwrap();
            let data = ImageFolder::open(dir, Transform::imagenet_train(24)).unwrap();
            let error = data.batch(&samples(1)).unwrap_err().to_string();
            assert!(error.contains("1.jpg") && error.contains(words), "no `{words}` in: {error}");
        }
    }
}
