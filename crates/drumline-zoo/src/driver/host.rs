//! Checks of this host: devices, files, folders.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use drumline::torch::{gpu, gpu_or_cpu};
use drumline_torch::cuda;
use tch::Device;

use crate::config::{DeviceKind, SharedKeys};
use crate::task::{Task, shared};
use crate::weights_file::has_shards;

/// Returns an error if the file that a key names does not exist.
pub(crate) fn check_file(key: &str, path: &Path, advice: &str) -> anyhow::Result<()> {
    ensure!(path.is_file(), "{key}: no file {}; try {advice}", path.display());
    Ok(())
}

/// Returns an error unless `MODEL.WEIGHTS` is a file, or a folder to which several ranks have written theirs.
pub(crate) fn check_weights(path: &Path) -> anyhow::Result<()> {
    if has_shards(path) {
        return Ok(());
    }
    check_file(
        "MODEL.WEIGHTS",
        path,
        "the path of a .safetensors file, or of a folder with the files of several ranks",
    )
}

/// The device of a rank: the GPU with its local rank's number, or the CPU.
pub(crate) fn device(kind: DeviceKind, local_rank: usize) -> anyhow::Result<Device> {
    Ok(match kind {
        DeviceKind::Cuda => gpu(local_rank).context("a GPU was asked for (cuda)")?,
        DeviceKind::Auto => gpu_or_cpu(local_rank),
        DeviceKind::Cpu => Device::Cpu,
    })
}

/// Returns an error if the requested device is missing. It also opens the GPUs, which must happen before any random
/// number is drawn. With `auto`, GPU errors are reported later, once.
pub(crate) fn check_device(kind: DeviceKind) -> anyhow::Result<()> {
    match kind {
        DeviceKind::Cuda => cuda::open().context("a GPU was asked for (cuda)"),
        DeviceKind::Auto => {
            let _ = cuda::open();
            Ok(())
        }
        DeviceKind::Cpu => Ok(()),
    }
}

/// Creates a folder and writes a trial file, so that a folder without write permission is reported before training.
pub(crate) fn check_writable(name: &str, folder: &Path) -> anyhow::Result<()> {
    let trial = std::fs::create_dir_all(folder).and_then(|()| trial_file(folder));
    trial.map_err(|cause| anyhow!("cannot write to {name} {}: {cause}; try another place", folder.display()))
}

/// The same for all folders that a training's keys name, beside its own.
pub(crate) fn check_folders<T: Task>(task: &T) -> anyhow::Result<()> {
    let SharedKeys { train, parallel, .. } = shared(task);
    let named = [("TRAIN.CSV", train.csv), ("PARALLEL.OFFLOAD_DIR", parallel.offload_dir)];
    let named = named.into_iter().filter_map(|(key, folder)| Some((key, folder?)));
    let mut folders = task.folders().others.into_iter().chain(named);
    folders.try_for_each(|(key, folder)| check_writable(key, &folder))
}

fn trial_file(folder: &Path) -> std::io::Result<()> {
    let trial = folder.join(format!(".trial-{}", std::process::id()));
    let written = std::fs::write(&trial, "x");
    // A write that failed on a full disk still leaves a file, so it is removed in either case.
    let removed = std::fs::remove_file(trial);
    written.and(removed)
}

/// The checksum of a file's bytes, which ranks compare.
pub(crate) fn checksum(file: &Path) -> anyhow::Result<u32> {
    if file.is_dir() {
        return checksum_of_folder(file);
    }
    let read = || -> std::io::Result<u32> {
        let (mut file, mut crc) = (std::fs::File::open(file)?, crc32fast::Hasher::new());
        let mut some = vec![0; 1 << 20];
        loop {
            match file.read(&mut some)? {
                0 => return Ok(crc.finalize()),
                len => crc.update(&some[..len]),
            }
        }
    };
    read().with_context(|| format!("cannot read {}", file.display()))
}

/// The checksum of all files of tensors in a folder.
fn checksum_of_folder(folder: &Path) -> anyhow::Result<u32> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|ending| ending == "safetensors"));
    files.sort();
    let mut crc = crc32fast::Hasher::new();
    for file in files {
        crc.update(&checksum(&file)?.to_le_bytes());
    }
    Ok(crc.finalize())
}
