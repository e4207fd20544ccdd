//! The libtorch side: what tch leaves out, and collectives on tensors.
//!
//! ```text
//!   Rust (this crate, safe) ─▶ C functions ─▶ shim/*.cpp ─▶ libtorch
//!        ▲ Result               null or a message            exceptions end here
//! ```
//!
//! - `hook`, `grad`: know when a gradient is there; set it, take it, make it undefined
//! - `memory`: tensors over memory of others, such as the symmetric heap
//! - `collectives`: all-reduce and its kin on tensors of any strides
//! - `function`: functions of autograd made of Rust closures
//! - `autocast`: mixed precision in a scope
//! - `batch_norm`: the sums of its backward
//! - `named`: parameters and buffers of a model, in an order that all ranks share
//! - `knobs`: denormals, determinism, how memory is kept between steps
//!
//! Every C++ exception becomes a [`TorchError`]; a panic in a Rust closure that C++ calls becomes one as well.

mod autocast;
mod batch_norm;
mod collectives;
mod error;
mod function;
mod grad;
mod hook;
mod knobs;
mod memory;
mod named;
mod status;

pub use autocast::{Autocast, autocast, no_autocast};
pub use batch_norm::batch_norm_sums;
pub use collectives::TensorCollectives;
pub use error::TorchError;
pub use function::{Backward, Forward, FunctionError, autograd_function};
pub use grad::{grad, set_grad, take_grad};
pub use hook::GradHook;
pub use knobs::{Determinism, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
pub use memory::{HeapTensor, tensor_from_vec, tensor_within};
pub use named::{Named, buffers, parameters};
