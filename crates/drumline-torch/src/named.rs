//! A model's tensors by name: the trained parameters, in the order of their creation, and the buffers.
//!
//! `VarStore` keeps names in a hash map, whose order differs from process to process. Ranks must visit the same tensors
//! in the same order, so all functions here return an order that all ranks share.

use tch::Tensor;
use tch::nn::VarStore;

/// A tensor with its name, which is PyTorch's (`layer1.0.conv1.weight`).
#[derive(Debug)]
pub struct Named {
    /// The name, with dots between its parts.
    pub name: String,
    /// A handle to the tensor that the model uses.
    pub tensor: Tensor,
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self { name: self.name.clone(), tensor: self.tensor.shallow_clone() }
    }
}

/// The parameters that are trained (not frozen), in the order in which the model created them.
///
/// ```
/// use drumline_torch::{buffers, parameters};
/// use tch::{nn, Device};
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let _conv = nn::conv2d(vs.root() / "conv", 3, 8, 3, Default::default());
/// let _norm = nn::batch_norm2d(vs.root() / "bn", 8, Default::default());
/// let names: Vec<_> = parameters(&vs).into_iter().map(|named| named.name).collect();
/// assert_eq!(names, ["conv.bias", "conv.weight", "bn.weight", "bn.bias"]);
/// let names: Vec<_> = buffers(&vs).into_iter().map(|named| named.name).collect();
/// assert_eq!(names, ["bn.running_mean", "bn.running_var"]);
/// vs.freeze();
/// assert_eq!(drumline_torch::frozen(&vs).len(), 4);
/// ```
pub fn parameters(store: &VarStore) -> Vec<Named> {
    let trained = store.trainable_variables();
    let mut named = by_name(store);
    let place = |tensor: &Tensor| trained.iter().position(|t| t.data_ptr() == tensor.data_ptr());
    named.retain(|named| named.tensor.requires_grad());
    named.sort_by_cached_key(|named| place(&named.tensor).unwrap_or(usize::MAX));
    named
}

/// The tensors that are not trained, such as running means and frozen parameters, sorted by name.
pub fn buffers(store: &VarStore) -> Vec<Named> {
    let mut named = by_name(store);
    named.retain(|named| !named.tensor.requires_grad());
    named
}

/// The frozen parameters, sorted by name: the part of [`buffers`] that no forward changes.
pub fn frozen(store: &VarStore) -> Vec<Named> {
    let trainable = store.trainable_variables();
    let mut named = buffers(store);
    named.retain(|named| trainable.iter().any(|tensor| tensor.data_ptr() == named.tensor.data_ptr()));
    named
}

fn by_name(store: &VarStore) -> Vec<Named> {
    let variables = store.variables().into_iter();
    let mut named: Vec<_> = variables.map(|(name, tensor)| Named { name, tensor }).collect();
    named.sort_by(|a, b| a.name.cmp(&b.name));
    named
}
