//! Settings of libtorch: devices, precision, determinism and memory.

pub use crate::device::{gpu, gpu_or_cpu, local_device};
pub use drumline_torch::{
    Determinism, LIBTORCH, RngState, TorchError, autocast, channels_last, flush_denormals, keep_freed_memory,
    libtorch_version, use_deterministic_algorithms, weights_channels_last,
};
