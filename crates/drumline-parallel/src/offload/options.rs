//! Where the states of a training lie, as a program chooses it.

use std::path::{Path, PathBuf};

use tch::Device;

use super::Result;
use crate::error::ParallelError;

/// Where a state of a training lies between its uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Place {
    /// Where the model trains.
    #[default]
    Device,
    /// In host memory, where the CPU steps it. For a model that trains on the CPU this is the same as `Device`.
    Host,
    /// In a file of each rank, in this folder. The file has no name, and is gone when the rank ends. Only for a model that
    /// trains on the CPU.
    Disk(PathBuf),
    /// Where the model trains as far as it fits there. The rest is in host memory beside a GPU, and in this folder if the
    /// model trains on the CPU.
    Auto(PathBuf),
}

impl Place {
    /// Whether nothing is moved, on a CPU.
    pub(crate) fn is_device(&self) -> bool {
        self.folder().is_none()
    }

    /// The folder of its files, if it has some.
    pub(crate) fn folder(&self) -> Option<&Path> {
        match self {
            Self::Device | Self::Host => None,
            Self::Disk(folder) | Self::Auto(folder) => Some(folder),
        }
    }
}

/// What is offloaded from the memory of the device on which a model trains.
#[derive(Debug, Clone, PartialEq)]
pub struct Offload {
    /// Where the optimizer's state lies, with f32 master weights.
    pub optimizer: Place,
    /// Where each rank's rows of parameters lie, in stage 3. With `Auto` they are in files.
    pub parameters: Place,
    /// How much of the optimizer's state is offloaded, in whole units: 1 is all of it. DeepSpeed's `ratio`.
    pub ratio: f64,
    /// Whether a model that trains on the CPU is offloaded to host memory as from a GPU, which tests do.
    pub mimics_gpu: bool,
}

impl Default for Offload {
    fn default() -> Self {
        Self { optimizer: Place::Device, parameters: Place::Device, ratio: 1.0, mimics_gpu: false }
    }
}

impl Offload {
    /// Whether nothing is offloaded.
    pub fn is_none(&self) -> bool {
        self.optimizer == Place::Device && self.parameters == Place::Device
    }

    /// An error if it cannot be done for a model on this device.
    pub(crate) fn check(&self, device: Device) -> Result {
        if !(0.0..=1.0).contains(&self.ratio) {
            let expected = "a part of the state: at least 0 and at most 1";
            return Err(ParallelError::value("the ratio of offloaded state", self.ratio, expected));
        }
        let is_on_gpu = device != Device::Cpu;
        if is_on_gpu && self.parameters != Place::Device {
            return Err(ParallelError::OffloadOnGpu {
                device,
                what: "rows of parameters stay",
                hint: "`parameters: Place::Device` (PARALLEL.OFFLOAD_PARAMS none), and more ranks with ZeRO-3",
            });
        }
        if is_on_gpu && matches!(self.optimizer, Place::Disk(_)) {
            return Err(ParallelError::OffloadOnGpu {
                device,
                what: "the optimizer's state lies there or in host memory, and not in files",
                hint: "`Place::Host` (PARALLEL.OFFLOAD host)",
            });
        }
        Ok(())
    }

    /// Whether the optimizer's state lies in host memory beside the device.
    pub(crate) fn is_beside(&self, device: Device) -> bool {
        let is_there = matches!(self.optimizer, Place::Host | Place::Auto(_));
        is_there && (device != Device::Cpu || self.mimics_gpu)
    }
}
