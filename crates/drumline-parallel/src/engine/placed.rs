//! The part of a model's tensor that a rank holds, and its place in the whole tensor.

use drumline_torch::{Named, buffers, parameters};
use tch::Tensor;
use tch::nn::VarStore;

/// The part of a model's tensor that a rank holds, and its place in the whole tensor.
#[derive(Debug)]
pub struct Placed {
    /// The name of the whole tensor.
    pub name: String,
    /// The part on this rank.
    pub tensor: Tensor,
    /// The size of the whole tensor.
    pub whole: Vec<i64>,
    /// The offset of this part along each dim.
    pub offsets: Vec<i64>,
    /// Whether this rank saves it, of all ranks that hold it.
    pub is_saved_here: bool,
}

/// A whole tensor of the model, of which a rank may hold nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whole {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size: Vec<i64>,
}

impl From<&Named> for Whole {
    fn from(Named { name, tensor }: &Named) -> Self {
        Self { name: name.clone(), size: tensor.size() }
    }
}

impl Clone for Placed {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            tensor: self.tensor.shallow_clone(),
            whole: self.whole.clone(),
            offsets: self.offsets.clone(),
            is_saved_here: self.is_saved_here,
        }
    }
}

impl Placed {
    /// A tensor that is not sharded.
    pub fn replicated(Named { name, tensor }: Named, is_saved_here: bool) -> Self {
        let whole = tensor.size();
        Self { name, tensor, offsets: vec![0; whole.len()], whole, is_saved_here }
    }

    /// All parameters and buffers of a store, which rank 0 saves.
    pub(crate) fn all_of(store: &VarStore, rank: usize) -> Vec<Self> {
        let all = parameters(store).into_iter().chain(buffers(store));
        all.map(|named| Self::replicated(named, rank == 0)).collect()
    }

    /// The whole tensor.
    pub fn of_whole(&self) -> Whole {
        Whole { name: self.name.clone(), size: self.whole.clone() }
    }

    /// Whether this rank holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.tensor.size() == self.whole
    }
}
