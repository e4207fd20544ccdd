//! Functions of autograd with a pass over memory forward and one backward, where libtorch's operations make many. For floats in the CPU's memory;
//! for others the callers' way is libtorch's.
//!
//! - `dropout`: random zeros without a stored mask, alone, after a ReLU or with a sum
//! - `cross_entropy`: with smoothed labels
//! - `floats`: tensors as slices, and processors told apart

mod cross_entropy;
mod dropout;
mod floats;

pub use cross_entropy::{SmoothedLabels, smoothed_cross_entropy};
pub use dropout::{dropout, relu_dropout, sum_with_dropout};
