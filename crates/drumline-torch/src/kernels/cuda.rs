//! Kernels of our own for NVIDIA GPUs, compiled when they are first needed.
//!
//! - `batch_norm`: normalisation with the sum and the ReLU after it, in two passes each way
//! - `place`: what a kernel must know of the GPU and the stream it runs on

mod batch_norm;
mod place;

pub use batch_norm::{Activation, BatchNormLayer, batch_norm_cuda};
