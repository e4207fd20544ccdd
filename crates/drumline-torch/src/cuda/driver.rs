//! Asks NVIDIA's driver whether there is a GPU, before libtorch's gigabyte of CUDA libraries is opened.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use libloading::os::unix::{Library, Symbol};

use super::error::{CudaError, cause};

/// The CUDA version that libtorch was built for: 13.0.
pub(super) const NEEDED: i32 = 13_000;

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;

/// A driver that is new enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA version that it supports: 13000 is 13.0.
    pub version: i32,
    /// The number of GPUs that this process may use.
    pub devices: usize,
}

impl Driver {
    /// Starts the driver and asks it.
    pub fn find() -> Result<Self, CudaError> {
        let no_driver = |error: libloading::Error| CudaError::NoDriver(cause(&error));
        // SAFETY: the driver's initializers have no conditions.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(no_driver)?;
        // SAFETY: the types are those of CUDA's driver interface.
        let (init, version, count) = unsafe {
            let init: Symbol<unsafe extern "C" fn(u32) -> c_int> =
                library.get(b"cuInit\0").map_err(no_driver)?;
            let version: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
                library.get(b"cuDriverGetVersion\0").map_err(no_driver)?;
            let count: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
                library.get(b"cuDeviceGetCount\0").map_err(no_driver)?;
            (init, version, count)
        };
        let (mut found, mut devices) = (0, 0);
        // SAFETY: takes a number.
        check(&library, unsafe { init(0) })?;
        // SAFETY: both write one number.
        unsafe {
            check(&library, version(&mut found))?;
            check(&library, count(&mut devices))?;
        }
        if found < NEEDED {
            return Err(CudaError::OldDriver { found, needed: NEEDED });
        }
        // libtorch uses it until the process ends.
        std::mem::forget(library);
        match usize::try_from(devices) {
            Ok(devices) if devices > 0 => Ok(Self { version: found, devices }),
            _ => Err(CudaError::NoDevice),
        }
    }
}

fn check(library: &Library, code: c_int) -> Result<(), CudaError> {
    match code {
        0 => Ok(()),
        NO_DEVICE => Err(CudaError::NoDevice),
        other => Err(CudaError::DriverFailed(error_text(library, other))),
    }
}

/// The driver's text for an error.
fn error_text(library: &Library, code: c_int) -> String {
    type ErrorString = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    let mut text = std::ptr::null();
    // SAFETY: the type is that of CUDA's driver interface; the text is a constant of the driver.
    unsafe {
        if let Ok(error_string) = library.get::<ErrorString>(b"cuGetErrorString\0")
            && error_string(code, &mut text) == 0
            && !text.is_null()
        {
            return format!("error {code}: {}", CStr::from_ptr(text).to_string_lossy());
        }
    }
    format!("error {code}")
}
