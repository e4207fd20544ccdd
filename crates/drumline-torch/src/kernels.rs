//! Autograd functions that make fewer passes over memory than libtorch's operations: for floats in host memory, and in
//! `cuda` for NVIDIA GPUs. For other tensors libtorch's operations are the fallback.
//!
//! - `dropout`: dropout without a stored mask: alone, after a ReLU, or with a sum
//! - `cross_entropy`: cross-entropy with label smoothing
//! - `floats`: tensors as slices, and loops compiled for several instruction sets

mod cross_entropy;
mod cuda;
mod dropout;
mod floats;

pub use cross_entropy::{SmoothedLabels, smoothed_cross_entropy};
pub use cuda::{
    Activation, BatchNormLayer, BranchEnd, LayerNormLayer, RightClasses, batch_norm_cuda,
    batch_norm_sum_relu_cuda, conv_stem_cuda, layer_norm_cuda, linear_cross_entropy_cuda, max_pool_cuda,
    sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
pub(crate) use cuda::{CheckedStep, MasterStep, Rounded, Rule};
pub use dropout::{dropout, relu_dropout, sum_with_dropout};
