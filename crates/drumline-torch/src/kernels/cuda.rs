//! Kernels of our own for NVIDIA GPUs, compiled when they are first needed.
//!
//! - `batch_norm`: normalisation with the sum and the ReLU after it, in two passes each way
//! - `layer_norm`: alone, or of a sum
//! - `cross_entropy`: a language model's head with its loss
//! - `master_step`: optimizers on f32 copies of parameters in fewer bits
//! - `max_pool`, `stem`: what ResNets begin with
//! - `place`: what a kernel must know of the GPU and the stream it runs on

mod batch_norm;
mod cross_entropy;
mod layer_norm;
mod master_step;
mod max_pool;
mod place;
mod stem;

pub use batch_norm::{Activation, BatchNormLayer, batch_norm_cuda, batch_norm_sum_relu_cuda};
pub use cross_entropy::{RightClasses, linear_cross_entropy_cuda};
pub use layer_norm::{
    BranchEnd, LayerNormLayer, layer_norm_cuda, sum_layer_norm_cuda, sums_with_layer_norm_cuda,
};
pub(crate) use master_step::{CheckedStep, MasterStep, Rounded, Rule};
pub use max_pool::max_pool_cuda;
pub use stem::conv_stem_cuda;
