//! The libtorch side: what tch leaves out, and collectives on tensors.
//!
//! ```text
//!   Rust (this crate, safe) ─▶ C functions ─▶ shim/*.cpp ─▶ libtorch
//!        ▲ Result               null or a message            exceptions end here
//! ```
//!
//! - `hook`, `grad`: learn when a gradient is ready; set it, take it, make it undefined
//! - `memory`: tensors over memory of other owners, such as the symmetric heap; `bytes`: a tensor's own memory
//! - `swap`: tensors whose memory is in a file of a disk between their uses
//! - `usage`: tensors whose memory comes and goes, and which of them an operation uses
//! - `collectives`: all-reduce and the other collectives on tensors of any strides
//! - `function`: autograd functions from Rust closures
//! - `backward`: backward from several tensors with given gradients
//! - `weight_grads`: layers whose weight gradients are computed later than the rest of backward
//! - `saved_tensors`, `checkpoint`: what autograd keeps for backward: replaced by hooks, or computed again
//! - `autocast`: forward passes in 16 bits; `amp`: loss scaling, so that small gradients do not underflow
//! - `named`: parameters and buffers of a model, in an order that all ranks share
//! - `fused`, `foreach`: fused optimizer kernels; one operation on a list of tensors
//! - `masks`: dropout that depends on seed, step, layer and position alone
//! - `kernels`: dropout, cross-entropy, norms and optimizer steps that read memory once
//! - `cuda`: GPUs, found when the program runs: streams, graphs, memory; `nccl`: collectives between GPUs
//! - `optim`, `clip`: SGD, Adam and AdamW, Lion, LAMB and Adafactor with savable state; gradient clipping
//! - `memory_format`: channels last, and weights in 16 bits
//! - `knobs`: denormals, determinism, TF32, how freed memory is kept; `rng`: the state of the random number generators
//!
//! Every C++ exception becomes a [`TorchError`]; a panic in a Rust closure that C++ calls becomes one as well.

mod amp;
mod autocast;
mod backward;
mod batch_norm;
mod bytes;
mod checkpoint;
mod clip;
mod collectives;
mod convolution;
pub mod cuda;
mod error;
mod foreach;
mod function;
mod fused;
mod grad;
mod hook;
mod kernels;
mod knobs;
mod list;
mod masks;
mod memory;
mod memory_format;
mod named;
pub mod nccl;
mod optim;
mod recordable;
mod rng;
mod saved_tensors;
mod status;
mod swap;
mod usage;
mod version;
mod weight_grads;

pub use amp::{
    DeepSpeedScale, DynamicScale, LossScaler, ScalePolicy, ScaledGrads, ScalerState, StepMade, Unscaled,
};
pub use autocast::{Autocast, autocast, no_autocast};
pub use backward::{GradEdge, KeepGraph, backward_from, backward_from_edges};
pub use batch_norm::batch_norm_sums;
pub use bytes::{bytes, bytes_mut};
pub use checkpoint::{checkpoint, is_recomputing, keep, keep_drawn, selective_checkpoint};
pub use clip::{
    NormType, clip_grad_norm, clip_grad_norm_by, clip_grad_norm_of, clip_grad_norm_on_device,
    clip_grad_norm_to, clip_grad_value, grad_norm, grad_norm_on_device,
};
pub use collectives::TensorCollectives;
pub use convolution::{Beside, Conv2d};
pub use error::TorchError;
pub use foreach::{
    foreach_add, foreach_add_scalar, foreach_clamp, foreach_copy, foreach_lerp, foreach_mul_scalar,
    foreach_mul_tensor, foreach_norm, foreach_zero,
};
pub use function::{Backward, Forward, FunctionError, autograd_function};
pub use fused::{FusedAdagrad, FusedAdam, FusedSgd, Lr, StepTensors, WeightDecay};
pub use grad::{grad, grads_are, move_grad, move_grads, set_grad, take_grad};
pub use hook::GradHook;
pub use kernels::{
    Activation, AdamSlices, AdamStep, BatchNormLayer, BranchEnd, Codes, Draw, GradSlices, LayerNormLayer,
    MomentSlices, PartOf, RightClasses, SmoothedLabels, WeightSlices, batch_norm_cuda,
    batch_norm_sum_relu_cuda, conv_stem_cuda, dropout, dropout_part, layer_norm_cuda,
    linear_cross_entropy_cuda, max_pool_cuda, relu_dropout, smoothed_cross_entropy, sum_layer_norm_cuda,
    sum_with_dropout, sums_with_layer_norm_cuda,
};
pub use knobs::{Determinism, allow_tf32, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
pub use masks::{MaskScope, Masks, StepSamples, mask_layer};
pub use memory::{HeapTensor, ValuesAt, node_shared, tensor_from_vec, tensor_within};
pub use memory_format::{channels_last, is_weight, weights_channels_last, weights_in};
pub use named::{Named, buffers, frozen, parameters};
pub use optim::{
    Adafactor, AdafactorOptions, Adagrad, AdagradOptions, Adam, AdamFamily, AdamOptions, AdamW,
    BiasCorrection, CopiedParameter, Division, Lamb, LambOptions, Lion, LionOptions, MasterKind,
    MasterWeights, Moments, Optimizer, OptimizerState, OwnRows, ParameterGroup, ParameterGroups, Sgd,
    SgdOptions, StateError, StepSize, no_decay_on_norms,
};
pub use recordable::{HostRoute, NotRecordable};
pub use rng::RngState;
pub use saved_tensors::{SavedSize, Unpack, offload_saved, saved_size, saved_tensor_hooks};
pub use swap::{PAGE, Pages, PinError, Rates, Relocated, SwapError, SwapFile};
pub use usage::{KERNEL, Movable, UsageWatch};
pub use version::{LIBTORCH, libtorch_version};
pub use weight_grads::{QueuedGrads, WeightGrads, addmm, embedding, linear};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
