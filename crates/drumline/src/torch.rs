//! Settings of libtorch: devices, precision, determinism and memory. Activation checkpointing.

pub use crate::device::{gpu, gpu_or_cpu, local_device};
pub use drumline_torch::{
    Determinism, LIBTORCH, RngState, SavedSize, TorchError, autocast, channels_last, checkpoint,
    flush_denormals, is_recomputing, keep, keep_freed_memory, libtorch_version, offload_saved, saved_size,
    saved_tensor_hooks, selective_checkpoint, use_deterministic_algorithms, weights_channels_last,
};
