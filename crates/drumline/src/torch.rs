//! Settings of libtorch: devices, precision, determinism and memory. Activation checkpointing, and dropout by position.

pub use crate::device::{gpu, gpu_or_cpu, local_device};
pub use drumline_torch::{
    Determinism, LIBTORCH, MaskScope, Masks, RngState, SavedSize, StepSamples, TorchError, autocast,
    channels_last, checkpoint, dropout, flush_denormals, is_recomputing, keep, keep_drawn, keep_freed_memory,
    libtorch_version, mask_layer, offload_saved, saved_size, saved_tensor_hooks, selective_checkpoint,
    use_deterministic_algorithms, weights_channels_last,
};
