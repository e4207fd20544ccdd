//! The libtorch side: what tch leaves out, and collectives on tensors.
//!
//! ```text
//!   Rust (this crate, safe) ─▶ C functions ─▶ shim/*.cpp ─▶ libtorch
//!        ▲ Result               null or a message            exceptions end here
//! ```
//!
//! - `hook`, `grad`: know when a gradient is there; set it, take it, make it undefined
//! - `memory`: tensors over memory of others, such as the symmetric heap; `bytes`: a tensor's own memory
//! - `named`: parameters and buffers of a model, in an order that all ranks share
//! - `knobs`: denormals, determinism, how memory is kept between steps; `rng`: the state of the random number generators
//!
//! Every C++ exception becomes a [`TorchError`]; a panic in a Rust closure that C++ calls becomes one as well.

mod bytes;
mod error;
mod grad;
mod hook;
mod knobs;
mod memory;
mod named;
mod rng;
mod status;

pub use bytes::{bytes, bytes_mut};
pub use error::TorchError;
pub use grad::{grad, set_grad, take_grad};
pub use hook::GradHook;
pub use knobs::{Determinism, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
pub use memory::{HeapTensor, tensor_from_vec, tensor_within};
pub use named::{Named, buffers, parameters};
pub use rng::RngState;
