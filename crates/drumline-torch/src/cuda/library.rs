//! Opens libtorch's CUDA libraries and our plugin, once per process.
//!
//! The plugin is part of this binary and is opened from memory, so that a program is one file. It takes its symbols
//! from libtorch's libraries, which are opened with `RTLD_GLOBAL`.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use rustix::fs::{MemfdFlags, memfd_create};
use torch_sys::C_tensor;

use super::driver::{Driver, NEEDED};
use super::error::{CudaError, cause};
use super::graph::{CudaGraph, RawPool};
use super::memory::RawMemory;
use super::properties::RawProperties;
use super::stream::{CudaEvent, RawStream};
use crate::status::{Message, check};
use crate::version::{LIBTORCH, fits, libtorch_version};

/// The plugin as the build script compiled it; empty if there were no CUDA headers.
static PLUGIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/drumline_cuda.so"));

/// Declares the functions of the plugin, with their types.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions of the plugin.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// Looks up all functions.
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the plugin, which was built together with this crate.
                unsafe {
                    Ok(Self { $($name: *library.get(concat!("drumline_cuda_", stringify!($name), "\0").as_bytes())?,)* })
                }
            }
        }
    };
}

functions! {
    device_count: fn(*mut i32) -> Message;
    versions: fn(*mut i32, *mut i32) -> Message;
    properties: fn(i32, *mut RawProperties) -> Message;
    can_access_peer: fn(i32, i32, *mut bool) -> Message;
    set_device: fn(i32) -> Message;
    exchange_device: fn(i32, *mut i32) -> Message;
    synchronize: fn(i32) -> Message;
    stream_new: fn(i32, bool, *mut RawStream) -> Message;
    stream_current: fn(i32, *mut RawStream) -> Message;
    stream_enter: fn(RawStream, *mut RawStream) -> Message;
    stream_synchronize: fn(RawStream) -> Message;
    stream_is_done: fn(RawStream, *mut bool) -> Message;
    stream_recording: fn(RawStream, *mut u64) -> Message;
    stream_raw: fn(RawStream, *mut *mut c_void) -> Message;
    event_new: fn(bool, *mut *mut CudaEvent) -> Message;
    event_free: fn(*mut CudaEvent);
    event_record: fn(*mut CudaEvent, RawStream) -> Message;
    event_block: fn(*mut CudaEvent, RawStream) -> Message;
    event_is_done: fn(*mut CudaEvent, *mut bool) -> Message;
    event_synchronize: fn(*mut CudaEvent) -> Message;
    event_milliseconds: fn(*mut CudaEvent, *mut CudaEvent, *mut f32) -> Message;
    pool_new: fn(*mut RawPool) -> Message;
    graph_new: fn(*mut *mut CudaGraph) -> Message;
    graph_free: fn(*mut CudaGraph);
    graph_begin: fn(*mut CudaGraph, RawPool, *mut u64) -> Message;
    graph_end: fn(*mut CudaGraph, RawPool) -> Message;
    graph_replay: fn(*mut CudaGraph) -> Message;
    memory: fn(i32, *mut RawMemory) -> Message;
    reset_peak: fn(i32) -> Message;
    empty_cache: fn() -> Message;
    pinned_like: fn(*const C_tensor, *mut *mut C_tensor) -> Message;
    host_register: fn(*mut c_void, usize) -> Message;
    host_unregister: fn(*mut c_void) -> Message;
    record_stream: fn(*const C_tensor, i64, i32) -> Message;
    window_new: fn(i32, usize, *mut *mut c_void, *mut c_void) -> Message;
    window_open: fn(i32, *const c_void, *mut *mut c_void) -> Message;
    window_free: fn(i32, *mut c_void) -> Message;
    window_close: fn(i32, *mut c_void) -> Message;
    window_tensor: fn(i32, *mut c_void, i64, *mut *mut C_tensor) -> Message;
    pinned_address: fn(*mut c_void, *mut *mut c_void) -> Message;
    flag_wait: fn(*mut c_void, *mut c_void, u32) -> Message;
    flag_write: fn(*mut c_void, *mut c_void, u32) -> Message;
}

/// Makes GPUs usable, for tch as well. Call it before anything else asks libtorch for a GPU. Later calls return the
/// first one's result.
///
/// ```
/// use drumline_torch::cuda;
///
/// match cuda::open() {
///     Ok(()) => println!("{} GPUs", cuda::device_count()?),
///     Err(why) => println!("training on the CPU: {why}"),
/// }
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn open() -> Result<(), CudaError> {
    functions().map(drop)
}

static OPENED: OnceLock<Result<Functions, CudaError>> = OnceLock::new();

/// Whether [`open`] was called with success.
pub fn is_open() -> bool {
    matches!(OPENED.get(), Some(Ok(_)))
}

/// The plugin's functions; opens the plugin if needed.
pub(super) fn functions() -> Result<&'static Functions, CudaError> {
    OPENED.get_or_init(open_all).as_ref().map_err(Clone::clone)
}

fn open_all() -> Result<Functions, CudaError> {
    let driver = Driver::find()?;
    if PLUGIN.is_empty() {
        return Err(CudaError::NotBuilt);
    }
    let folder = libtorch_folder()?;
    let cuda = folder.join("libtorch_cuda.so");
    if !cuda.is_file() {
        return Err(CudaError::NoLibrary(cuda));
    }
    let found = libtorch_version();
    if !fits(&found, LIBTORCH) {
        return Err(CudaError::OtherLibtorch { found, expected: LIBTORCH.to_owned() });
    }
    for library in [folder.join("libc10_cuda.so"), cuda] {
        std::mem::forget(open_global(&library, &library.display().to_string())?);
    }
    let plugin = open_plugin()?;
    let functions = Functions::of(&plugin).map_err(|error| unopened("the CUDA plugin", &error));
    // It is used until the process ends.
    std::mem::forget(plugin);
    let functions = functions?;
    let [mut known, mut found] = [0; 2];
    // SAFETY: writes two numbers.
    check(unsafe { (functions.versions)(&mut known, &mut found) }, "cannot read CUDA's versions").map_err(
        |error| CudaError::Unopened { library: "the CUDA plugin".to_owned(), cause: error.to_string() },
    )?;
    if found / 1000 != NEEDED / 1000 {
        return Err(CudaError::OtherCuda { found, expected: NEEDED });
    }
    if !tch::Cuda::is_available() {
        return Err(CudaError::TooLate { devices: driver.devices });
    }
    Ok(functions)
}

/// The folder of the libtorch that this process uses.
pub(crate) fn libtorch_folder() -> Result<PathBuf, CudaError> {
    let missing = || CudaError::NoLibrary(PathBuf::from("libtorch_cpu.so"));
    let maps = fs::read_to_string("/proc/self/maps").map_err(|_| missing())?;
    let path = maps
        .lines()
        .find_map(|line| Some(&line[line.find('/')?..]).filter(|path| path.ends_with("/libtorch_cpu.so")));
    path.and_then(|path| Path::new(path).parent()).map(Path::to_owned).ok_or_else(missing)
}

fn open_plugin() -> Result<Library, CudaError> {
    let system = |cause: std::io::Error| CudaError::Unopened {
        library: "the CUDA plugin".to_owned(),
        cause: cause.to_string(),
    };
    let memory =
        memfd_create("drumline_cuda.so", MemfdFlags::CLOEXEC).map_err(|error| system(error.into()))?;
    let mut file = fs::File::from(memory);
    file.write_all(PLUGIN).map_err(system)?;
    open_global(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), "the CUDA plugin")
}

fn open_global(path: &Path, name: &str) -> Result<Library, CudaError> {
    // SAFETY: libtorch's libraries and our own; their initializers only register their contents.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| unopened(name, &error))
}

fn unopened(library: &str, error: &libloading::Error) -> CudaError {
    CudaError::Unopened { library: library.to_owned(), cause: cause(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_is_part_of_this_binary() {
        assert!(PLUGIN.starts_with(b"\x7fELF"), "{} bytes", PLUGIN.len());
    }

    #[test]
    fn the_folder_of_the_loaded_libtorch_is_found() {
        assert!(libtorch_folder().unwrap().join("libc10.so").is_file());
    }
}
