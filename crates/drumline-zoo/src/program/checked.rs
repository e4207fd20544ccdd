//! What can be found wrong before a run begins: the configuration, its data sets, the device, the place for its output.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use drumline::{gpu, gpu_or_cpu};
use drumline_torch::cuda;
use tch::Device;

use super::args::RunArgs;
use super::data_kind::{Found, find};
use crate::config::{Config, DeviceKind};
use crate::data::Split;
use crate::models;

/// What every rank finds out alone, before it waits for the others.
pub(super) struct Checked {
    pub(super) config: Config,
    pub(super) test: Found,
}

/// The same for a run that trains.
pub(super) struct CheckedTraining {
    pub(super) run: Checked,
    pub(super) train: Found,
}

/// The configuration that the command line asks for.
fn load(args: &RunArgs) -> anyhow::Result<Config> {
    let mut config = Config::load(Some(&args.cfg), &args.pairs)?;
    config.run.device = args.device.unwrap_or(config.run.device);
    Ok(config)
}

impl CheckedTraining {
    pub(super) fn new(args: &RunArgs) -> anyhow::Result<Self> {
        let config = load(args)?;
        let train = find(&config, Split::Train)?;
        Ok(Self { run: Checked::new(config)?, train })
    }
}

impl Checked {
    pub(super) fn for_test(args: &RunArgs) -> anyhow::Result<Self> {
        Self::new(load(args)?)
    }

    fn new(config: Config) -> anyhow::Result<Self> {
        models::check_name(&config.model.arch)?;
        let test = find(&config, Split::Test)?;
        check_weights(config.model.weights.as_deref())?;
        check_device(config.run.device)?;
        Ok(Self { config, test })
    }
}

/// Whether `MODEL.WEIGHTS` are there.
pub(super) fn check_weights(weights: Option<&Path>) -> anyhow::Result<()> {
    if let Some(weights) = weights {
        ensure!(
            weights.is_file(),
            "MODEL.WEIGHTS: no file {}; try the path of a .safetensors file",
            weights.display()
        );
    }
    Ok(())
}

/// The device of a rank.
pub(super) fn device(kind: DeviceKind, local_rank: usize) -> anyhow::Result<Device> {
    Ok(match kind {
        DeviceKind::Cuda => gpu(local_rank).context("a GPU was asked for (cuda)")?,
        DeviceKind::Auto => gpu_or_cpu(local_rank),
        DeviceKind::Cpu => Device::Cpu,
    })
}

/// Whether what is asked for is there. Also opens GPUs, which must be before anything draws a number; what is said of them is said later, once.
pub(super) fn check_device(kind: DeviceKind) -> anyhow::Result<()> {
    match kind {
        DeviceKind::Cuda => cuda::open().context("a GPU was asked for (cuda)"),
        DeviceKind::Auto => {
            let _ = cuda::open();
            Ok(())
        }
        DeviceKind::Cpu => Ok(()),
    }
}

/// Makes a folder and tries to write to it, so that hours of work are not lost at their end.
pub(super) fn check_writable(name: &str, folder: &Path) -> anyhow::Result<()> {
    let trial = std::fs::create_dir_all(folder).and_then(|()| tempfile(folder));
    trial.map_err(|cause| anyhow!("cannot write to {name} {}: {cause}; try another place", folder.display()))
}

/// Of a file's bytes, for ranks to compare.
pub(super) fn checksum(file: &Path) -> anyhow::Result<u32> {
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

fn tempfile(folder: &Path) -> std::io::Result<()> {
    let trial = folder.join(format!(".trial-{}", std::process::id()));
    let written = std::fs::write(&trial, "x");
    // On a full disk the file is made all the same.
    let removed = std::fs::remove_file(trial);
    written.and(removed)
}
