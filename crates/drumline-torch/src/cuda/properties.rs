//! Properties of the GPUs of this machine.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use super::library::functions;
use crate::error::TorchError;
use crate::status::check;

/// As the plugin writes it.
#[repr(C)]
#[derive(Debug)]
pub(super) struct RawProperties {
    name: [c_char; 256],
    pci_bus_id: [c_char; 32],
    major: i32,
    minor: i32,
    multiprocessors: i32,
    clock_khz: i32,
    total_memory: u64,
    l2_cache: u64,
    shared_memory_per_block: u64,
}

/// The properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its product name.
    pub name: String,
    /// Its address on the PCI bus, such as `0000:3b:00.0`: the same for all processes of a machine.
    pub pci_bus_id: String,
    /// Its compute capability: (9, 0) for an H200.
    pub capability: (i32, i32),
    /// How many streaming multiprocessors it has.
    pub multiprocessors: i32,
    /// Its maximum clock rate.
    pub clock_khz: i32,
    /// Bytes of memory.
    pub total_memory: u64,
    /// Bytes of second-level cache.
    pub l2_cache: u64,
    /// Bytes of shared memory that a block may use.
    pub shared_memory_per_block: u64,
    /// The newest CUDA version of the driver, and the version of the runtime: 13000 is 13.0.
    pub versions: (i32, i32),
}

impl Properties {
    /// The properties of the GPU with this index among those that this process sees.
    pub fn of(device: usize) -> Result<Self, TorchError> {
        let functions = functions()?;
        // SAFETY: numbers and text, for which zeros are valid.
        let mut raw: RawProperties = unsafe { std::mem::zeroed() };
        let (mut driver, mut runtime) = (0, 0);
        // SAFETY: writes into the given structs.
        unsafe {
            check((functions.properties)(index(device)?, &mut raw), "cannot read the properties of a GPU")?;
            check((functions.versions)(&mut driver, &mut runtime), "cannot read CUDA's versions")?;
        }
        Ok(Self {
            name: text(&raw.name),
            pci_bus_id: text(&raw.pci_bus_id),
            capability: (raw.major, raw.minor),
            multiprocessors: raw.multiprocessors,
            clock_khz: raw.clock_khz,
            total_memory: raw.total_memory,
            l2_cache: raw.l2_cache,
            shared_memory_per_block: raw.shared_memory_per_block,
            versions: (driver, runtime),
        })
    }
}

/// The number of GPUs that this process sees; at least one.
pub fn device_count() -> Result<usize, TorchError> {
    let mut count = 0;
    // SAFETY: fills one number.
    check(unsafe { (functions()?.device_count)(&mut count) }, "cannot count the GPUs")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Whether one GPU can read the memory of another directly.
pub fn can_access_peer(device: usize, peer: usize) -> Result<bool, TorchError> {
    let mut can = false;
    // SAFETY: fills one bool.
    let message = unsafe { (functions()?.can_access_peer)(index(device)?, index(peer)?, &mut can) };
    check(message, "cannot check access between GPUs")?;
    Ok(can)
}

/// Makes a GPU the current device of this thread.
pub fn set_device(device: usize) -> Result<(), TorchError> {
    // SAFETY: takes a number.
    check(unsafe { (functions()?.set_device)(index(device)?) }, "cannot choose a GPU")
}

/// A GPU is the current device of this thread until this is dropped.
#[derive(Debug)]
pub(super) struct CurrentDevice {
    before: i32,
}

impl CurrentDevice {
    pub(super) fn enter(device: usize) -> Result<Self, TorchError> {
        let mut before = 0;
        // SAFETY: fills one number.
        check(unsafe { (functions()?.exchange_device)(index(device)?, &mut before) }, "cannot choose a GPU")?;
        Ok(Self { before })
    }
}

impl Drop for CurrentDevice {
    fn drop(&mut self) {
        if let Ok(functions) = functions() {
            let mut left = 0;
            // SAFETY: fills one number. Restoring what libtorch returned does not fail.
            let _ =
                check(unsafe { (functions.exchange_device)(self.before, &mut left) }, "cannot choose a GPU");
        }
    }
}

/// Waits until a GPU has finished all its work.
pub fn synchronize(device: usize) -> Result<(), TorchError> {
    // SAFETY: takes a number.
    check(unsafe { (functions()?.synchronize)(index(device)?) }, "cannot wait for a GPU")
}

/// A GPU's index for CUDA.
pub(super) fn index(device: usize) -> Result<i32, TorchError> {
    i32::try_from(device).map_err(|_| TorchError::value("the index of a GPU", device, "less than 2^31"))
}

fn text(field: &[c_char]) -> String {
    // SAFETY: the plugin writes a zero-terminated text that fits into the field.
    unsafe { CStr::from_ptr(field.as_ptr()) }.to_string_lossy().into_owned()
}
