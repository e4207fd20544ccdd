//! Why no GPU can be used.

use std::path::PathBuf;

/// A library, driver or GPU is missing or has the wrong version.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library does not exist.
    #[error("there is no NVIDIA driver here ({0}); try a machine with a GPU, or to train with --device cpu")]
    NoDriver(String),
    /// The driver exists, and does not start.
    #[error(
        "the NVIDIA driver does not start ({0}); try `nvidia-smi`, which may say more, or to train with --device cpu"
    )]
    DriverFailed(String),
    /// The driver is older than the CUDA that libtorch was built for.
    #[error(
        "the NVIDIA driver offers CUDA {}.{}, expected {}.{} or later; try a newer driver, or to train with --device cpu",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// The version that it offers, as CUDA counts: 13000 is 13.0.
        found: i32,
        /// The version that is needed.
        needed: i32,
    },
    /// There is a driver, but no GPU that this process may use.
    #[error("the NVIDIA driver shows no GPU to this process{}; try to train with --device cpu", visible())]
    NoDevice,
    /// This libtorch was built without CUDA.
    #[error("{} does not exist: this libtorch was built without CUDA; try `cargo xtask libtorch --cuda`", .0.display())]
    NoLibrary(PathBuf),
    /// A library cannot be opened.
    #[error(
        "cannot open {library}: {cause}; try `cargo xtask libtorch --cuda`, or to train with --device cpu"
    )]
    Unopened {
        /// Which one.
        library: String,
        /// The error of the system.
        cause: String,
    },
    /// The process has loaded another libtorch than the one this program was built for.
    #[error(
        "the libtorch of this process is {found}, expected {expected}; try `cargo xtask libtorch --cuda`, or LD_LIBRARY_PATH with another"
    )]
    OtherLibtorch {
        /// The version that was found.
        found: String,
        /// The version that this program was built for.
        expected: String,
    },
    /// libtorch was built for another CUDA.
    #[error(
        "this libtorch was built for CUDA {}.{}, expected {}.x; try `cargo xtask libtorch --cuda`, or LD_LIBRARY_PATH with another",
        .found / 1000, .found % 1000 / 10, .expected / 1000
    )]
    OtherCuda {
        /// Its CUDA version, as CUDA counts: 12080 is 12.8.
        found: i32,
        /// The version that this program was built for.
        expected: i32,
    },
    /// This program was built without CUDA's headers.
    #[error("this program was built without CUDA's headers; try `cargo xtask libtorch`, and build it again")]
    NotBuilt,
    /// libtorch was asked about GPUs too early, and does not look again.
    #[error(
        "libtorch sees no GPU, although the driver shows {devices}: something used CUDA before `cuda::open()`; try `cuda::open()` as the first thing in `main`"
    )]
    TooLate {
        /// The number of GPUs that the driver shows.
        devices: usize,
    },
}

/// The error of the system; the error itself only says which call failed.
pub(crate) fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// An environment variable that hides GPUs is the usual reason.
fn visible() -> String {
    std::env::var("CUDA_VISIBLE_DEVICES")
        .map_or_else(|_| String::new(), |value| format!(" (CUDA_VISIBLE_DEVICES={value:?})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_show_versions_with_a_dot() {
        let error = CudaError::OldDriver { found: 12080, needed: 13000 }.to_string();
        assert!(error.contains("CUDA 12.8, expected 13.0 or later"), "{error}");
    }
}
