//! Our own kernels for NVIDIA GPUs, compiled when they are first needed.
//!
//! - `batch_norm`: batch normalisation fused with the sum and the ReLU after it
//! - `dropout`: dropout by position; `layer_norm`: layer normalisation, alone or of a sum
//! - `cross_entropy`: the last layer of a language model with its loss
//! - `master_step`: steps of SGD and Adam on f32 master weights, with libtorch's numbers
//! - `optimizer_step`: steps of Adam with less state, Lion and LAMB, with the numbers of our CPU kernels
//! - `max_pool`, `stem`: the first layers of ResNets
//! - `place`: what kernels need to know about their GPU and stream

mod batch_norm;
mod cross_entropy;
mod dropout;
mod layer_norm;
mod master_step;
mod max_pool;
mod optimizer_step;
mod place;
mod stem;

pub use batch_norm::{Activation, BatchNormLayer, batch_norm_cuda, batch_norm_sum_relu_cuda};
pub use cross_entropy::{RightClasses, linear_cross_entropy_cuda};
pub(super) use dropout::{CudaMask, Dropped, drops_on};
pub use layer_norm::{
    BranchEnd, LayerNormLayer, layer_norm_cuda, sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
pub(crate) use master_step::{CheckedStep, MasterStep, Rounded, Rule};
pub use max_pool::max_pool_cuda;
pub(crate) use optimizer_step::{
    GpuAdam, GpuElements, GpuLamb, GpuRates, adam_on_gpu, gpu_steps, lamb_means_on_gpu, lamb_weights_on_gpu,
    lion_on_gpu,
};
pub use stem::conv_stem_cuda;
