//! Reading of CIFAR's files, and errors for damaged ones.

use std::fs;

use super::*;

/// Writes files with the given numbers of images. Image i of a file has label i % classes and its own pixels.
fn write(dir: &Path, kind: CifarKind, split: Split, counts: &[usize]) {
    for (file, count) in kind.files(split).iter().zip(counts) {
        let record = |i: usize| {
            let label = (i as i64 % kind.num_classes()) as u8;
            let labels = [vec![label / 5; kind.label_bytes() - 1], vec![label]].concat();
            let pixels = (0..PIXELS).map(move |place| (i * 7 + place * 3 + place / 1024) as u8);
            labels.into_iter().chain(pixels)
        };
        fs::write(dir.join(file), (0..*count).flat_map(record).collect::<Vec<u8>>()).unwrap();
    }
}

fn refused(dir: &Path) -> String {
    Cifar::open(dir, Split::Train, Transform::cifar_test()).unwrap_err().to_string()
}

#[test]
fn images_labels_and_names_match_the_files() {
    for (kind, split, counts) in [
        (CifarKind::Cifar10, Split::Train, &[3, 3, 2, 2, 2][..]),
        (CifarKind::Cifar10, Split::Test, &[12]),
        (CifarKind::Cifar100, Split::Train, &[12]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), kind, split, counts);
        let data = Cifar::open(folder.path(), split, Transform::cifar_test()).unwrap();
        assert_eq!((data.kind(), data.len()), (kind, 12));
        let samples = [4, 0, 11].map(|index| Sample::new(1, 0, index));
        let batch = data.batch(&samples).unwrap();
        assert_eq!(batch.images.size(), [3, 3, 32, 32]);
        assert_eq!(batch.indices, [4, 0, 11]);
        for (place, index) in [4, 0, 11].into_iter().enumerate() {
            let (labels, pixels) = data.record(index);
            assert_eq!(batch.labels.int64_value(&[place as i64]), i64::from(*labels.last().unwrap()));
            let expected = (f32::from(pixels[2 * 1024 + 5 * 32 + 9]) / 255.0 - 0.4465) / 0.2010;
            assert_eq!(batch.images.double_value(&[place as i64, 2, 5, 9]) as f32, expected);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), CifarKind::Cifar10, Split::Train, &[3, 3, 2, 2, 2]);
    let data = Cifar::open(folder.path(), Split::Train, Transform::cifar_test()).unwrap();
    assert_eq!(data.name(0), "image 0 of data_batch_1.bin");
    assert_eq!(data.name(7), "image 1 of data_batch_3.bin");
    assert_eq!(data.name(11), "image 1 of data_batch_5.bin");
}

#[test]
fn the_folder_of_the_archive_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("cifar-100-binary");
    fs::create_dir(&inner).unwrap();
    write(&inner, CifarKind::Cifar100, Split::Test, &[3]);
    let data = Cifar::open(folder.path(), Split::Test, Transform::cifar_test()).unwrap();
    assert_eq!((data.kind(), data.len()), (CifarKind::Cifar100, 3));
}

#[test]
fn augmentation_depends_only_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), CifarKind::Cifar10, Split::Test, &[40]);
    let data = Cifar::open(folder.path(), Split::Test, Transform::cifar_train()).unwrap();
    let samples: Vec<_> = (0..40).map(|index| Sample::new(7, 3, index)).collect();
    let whole = data.batch(&samples).unwrap().images;
    let backwards: Vec<_> = samples.iter().rev().copied().collect();
    assert_eq!(data.batch(&backwards).unwrap().images.flip([0]), whole);
    let later: Vec<_> = (0..40).map(|index| Sample::new(7, 4, index)).collect();
    assert_ne!(data.batch(&later).unwrap().images, whole);
}

#[test]
fn damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    assert!(refused(dir).contains("synth-cifar"), "{}", refused(dir));
    let write = || write(dir, CifarKind::Cifar10, Split::Train, &[30, 30, 30, 30, 29]);
    let third = dir.join("data_batch_3.bin");
    let full = {
        write();
        assert_eq!(Cifar::open(dir, Split::Train, Transform::cifar_test()).unwrap().len(), 149);
        fs::read(&third).unwrap()
    };
    for (bytes, words) in [
        (&full[..full.len() - 100], "92090 bytes, expected a multiple of 3073"),
        (&full[..3073 * 11], "has 11 images, others 30"),
        (&[], "has 0 bytes"),
    ] {
        fs::write(&third, bytes).unwrap();
        assert!(
            refused(dir).contains("data_batch_3.bin") && refused(dir).contains(words),
            "{}",
            refused(dir)
        );
    }
    let mut bad = full.clone();
    bad[3073 * 4] = 10;
    fs::write(&third, bad).unwrap();
    assert!(refused(dir).contains("label 10 at image 4, expected 0 to 9"), "{}", refused(dir));
    fs::remove_file(&third).unwrap();
    assert!(refused(dir).contains("data_batch_3.bin\" is missing"), "{}", refused(dir));
}
