//! The GPUs of this node and the NUMA node of each. They are in the order of their PCI addresses, which is the order of
//! `nvidia-smi` and, for equal GPUs, of CUDA.

use std::fs;
use std::path::Path;

/// Nvidia's PCI vendor id, and the prefix of the PCI classes of display and compute devices.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gpu {
    /// `GPU-5ebe…`, if the driver reports it.
    pub uuid: Option<String>,
    /// Its NUMA node.
    pub node: usize,
}

impl Gpu {
    /// Its NUMA node if `name`, in the format of `CUDA_VISIBLE_DEVICES`, means this GPU, which is the `at`-th.
    pub(super) fn node_if_named(&self, name: &str, at: usize) -> Option<usize> {
        let by_uuid = name.starts_with("GPU-")
            && self.uuid.as_ref().is_some_and(|uuid| uuid.to_lowercase().starts_with(&name.to_lowercase()));
        (name.parse() == Ok(at) || by_uuid).then_some(self.node)
    }
}

/// Reads the GPUs from the files below `root` (usually `/`).
pub(super) fn read(root: &Path) -> Vec<Gpu> {
    let driver = root.join("proc/driver/nvidia/gpus");
    let devices = root.join("sys/bus/pci/devices");
    let mut addresses = names_in(&driver);
    if addresses.is_empty() {
        addresses = names_in(&devices);
        addresses.retain(|address| is_gpu(&devices.join(address)));
    }
    addresses.sort_unstable();
    let gpu = |address: &String| Gpu {
        uuid: uuid(&driver.join(address)),
        // A machine with a single node reports -1.
        node: line(&devices.join(address).join("numa_node")).and_then(|node| node.parse().ok()).unwrap_or(0),
    };
    addresses.iter().map(gpu).collect()
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn line(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_string())
}

fn is_gpu(device: &Path) -> bool {
    line(&device.join("vendor")).as_deref() == Some(NVIDIA)
        && line(&device.join("class")).is_some_and(|class| class.starts_with(DISPLAY))
}

fn uuid(of_driver: &Path) -> Option<String> {
    let text = fs::read_to_string(of_driver.join("information")).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix("GPU UUID:")?.trim().to_string()))
}
