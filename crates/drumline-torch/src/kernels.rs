//! Autograd functions and optimizer steps that make fewer passes over memory than libtorch's operations: for floats in
//! host memory, and in `cuda` for NVIDIA GPUs. For other tensors libtorch's operations are the fallback.
//!
//! - `dropout`: dropout without a stored mask: alone, after a ReLU, or with a sum
//! - `cross_entropy`: cross-entropy with label smoothing
//! - `adam`, `lion`, `lamb`, `adafactor`: steps of optimizers on slices
//! - `weights`, `halves`, `code_map`: weights, gradients and moments in 32, 16 and 8 bits
//! - `floats`: tensors as slices, and loops compiled for several instruction sets; `random`, `threads`

pub(crate) mod adafactor;
mod adam;
mod code_map;
mod cross_entropy;
mod cuda;
mod dropout;
pub(crate) mod floats;
mod halves;
pub(crate) mod lamb;
pub(crate) mod lion;
mod random;
mod threads;
mod weights;

pub use adam::{AdamSlices, AdamStep, Codes, MomentSlices};
pub(crate) use code_map::BLOCK;

pub use cross_entropy::{SmoothedLabels, smoothed_cross_entropy};
pub use cuda::{
    Activation, BatchNormLayer, BranchEnd, LayerNormLayer, RightClasses, batch_norm_cuda,
    batch_norm_sum_relu_cuda, conv_stem_cuda, layer_norm_cuda, linear_cross_entropy_cuda, max_pool_cuda,
    sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
pub(crate) use cuda::{
    CheckedStep, GpuAdam, GpuElements, GpuLamb, GpuRates, MasterStep, Rounded, Rule, adam_on_gpu, gpu_steps,
    lamb_means_on_gpu, lamb_weights_on_gpu, lion_on_gpu,
};
use dropout::Rate;
pub use dropout::{PartOf, dropout, dropout_part, relu_dropout, sum_with_dropout};
pub(crate) use halves::{join_all, split_all};
pub use random::Draw;
pub(crate) use random::mix;
pub(crate) use threads::{JOB, on_threads};
pub(crate) use weights::Elements;
pub use weights::{GradSlices, WeightSlices};
