//! Why no GPU can be used.

use std::path::PathBuf;

/// What is missing, or does not fit.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error("there is no NVIDIA driver here ({0}); try a machine with a GPU, or to train with --device cpu")]
    NoDriver(String),
    /// It is, and does not start.
    #[error(
        "the NVIDIA driver does not start ({0}); try `nvidia-smi`, which may say more, or to train with --device cpu"
    )]
    DriverFailed(String),
    /// The driver is older than the CUDA that libtorch was made for.
    #[error(
        "the NVIDIA driver offers CUDA {}.{}, expected {}.{} or later; try a newer driver, or to train with --device cpu",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// What it offers, as CUDA counts: 13000 is 13.0.
        found: i32,
        /// What is needed.
        needed: i32,
    },
    /// There is a driver, and no GPU that this process may use.
    #[error("the NVIDIA driver shows no GPU to this process{}; try to train with --device cpu", visible())]
    NoDevice,
    /// libtorch has no CUDA half.
    #[error("{} is not there: this libtorch is the half for processors; try `cargo xtask libtorch --cuda`", .0.display())]
    NoLibrary(PathBuf),
    /// A library cannot be opened.
    #[error(
        "cannot open {library}: {cause}; try `cargo xtask libtorch --cuda`, or to train with --device cpu"
    )]
    Unopened {
        /// Which one.
        library: String,
        /// What the system said.
        cause: String,
    },
    /// Another libtorch was found than the one this program was built for.
    #[error(
        "the libtorch of this process is {found}, expected {expected}; try `cargo xtask libtorch --cuda`, or LD_LIBRARY_PATH with another"
    )]
    OtherLibtorch {
        /// What was found.
        found: String,
        /// What this program was built for.
        expected: String,
    },
    /// libtorch was built for another CUDA.
    #[error(
        "this libtorch was built for CUDA {}.{}, expected {}.x; try `cargo xtask libtorch --cuda`, or LD_LIBRARY_PATH with another",
        .found / 1000, .found % 1000 / 10, .expected / 1000
    )]
    OtherCuda {
        /// Its CUDA, as CUDA counts: 12080 is 12.8.
        found: i32,
        /// What this program was built for.
        expected: i32,
    },
    /// This program was built where the headers of CUDA were missing.
    #[error(
        "this program was built without the headers of CUDA; try `cargo xtask libtorch`, and build it again"
    )]
    NotBuilt,
    /// libtorch was asked about GPUs too early, and does not look again.
    #[error(
        "libtorch sees no GPU, although the driver shows {devices}: it was asked for CUDA before it was opened; try `cuda::open()` as the first thing in `main`"
    )]
    TooLate {
        /// How many the driver shows.
        devices: usize,
    },
}

/// What the system said of a library: the error itself says only which call failed.
pub(crate) fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// A variable that hides GPUs is the usual reason.
fn visible() -> String {
    std::env::var("CUDA_VISIBLE_DEVICES")
        .map_or_else(|_| String::new(), |value| format!(" (CUDA_VISIBLE_DEVICES={value:?})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_as_people_write_them() {
        let told = CudaError::OldDriver { found: 12080, needed: 13000 }.to_string();
        assert!(told.contains("CUDA 12.8, expected 13.0 or later"), "{told}");
    }
}
