//! The part of a model's tensor that a rank holds, and its place in the whole tensor.

use drumline_torch::{Named, buffers, parameters};
use serde::{Deserialize, Serialize};
use tch::Tensor;
use tch::nn::VarStore;

use super::Result;

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
    /// If it has several places in the whole tensor: the boxes of which it consists. Then `offsets` are those of the first.
    pub boxes: Vec<PlacedBox>,
}

/// A box of what a rank holds, and its place in the whole tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedBox {
    /// Its first element in what the rank holds.
    pub at: Vec<i64>,
    /// Its first element in the whole tensor.
    pub offsets: Vec<i64>,
    /// Its size.
    pub size: Vec<i64>,
}

impl PlacedBox {
    /// All of a tensor of this size.
    pub(super) fn whole(size: &[i64]) -> Self {
        let zeros = vec![0; size.len()];
        Self { at: zeros.clone(), offsets: zeros, size: size.to_vec() }
    }

    /// Whether it lies in a whole tensor of this size.
    pub(super) fn is_of(&self, whole: &[i64]) -> bool {
        let Self { offsets, size, .. } = self;
        let mut dims = offsets.iter().zip(size).zip(whole);
        let is_within = dims.all(|((offset, size), whole)| *offset >= 0 && offset + size <= *whole);
        offsets.len() == whole.len() && size.len() == whole.len() && is_within
    }

    /// What a rank holds of this box of a variable, if it holds these rows of the variable.
    pub(super) fn within(&self, rows: &Placed) -> Option<Self> {
        let mut common = self.clone();
        for (dim, (start, len)) in rows.offsets.iter().zip(rows.tensor.size()).enumerate() {
            let first = self.at[dim].max(*start);
            common.size[dim] = (self.at[dim] + self.size[dim]).min(start + len) - first;
            common.offsets[dim] += first - self.at[dim];
            common.at[dim] = first - start;
        }
        common.size.iter().all(|len| *len > 0).then_some(common)
    }

    /// The number of elements of the whole that two boxes share.
    pub(super) fn shared(&self, other: &Self) -> i64 {
        let dims = self.offsets.iter().zip(&self.size).zip(other.offsets.iter().zip(&other.size));
        dims.map(|((offset, size), (other, len))| {
            ((offset + size).min(other + len) - offset.max(other)).max(0)
        })
        .product()
    }
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
            boxes: self.boxes.clone(),
        }
    }
}

impl Placed {
    /// A tensor that is not sharded.
    pub fn replicated(Named { name, tensor }: Named, is_saved_here: bool) -> Self {
        let whole = tensor.size();
        Self { name, tensor, offsets: vec![0; whole.len()], whole, is_saved_here, boxes: Vec::new() }
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

    /// The boxes of which it consists: one, unless it has several places in the whole tensor.
    pub fn boxes(&self) -> Vec<PlacedBox> {
        if self.boxes.is_empty() {
            let one = PlacedBox::whole(&self.tensor.size());
            return vec![PlacedBox { offsets: self.offsets.clone(), ..one }];
        }
        self.boxes.clone()
    }

    /// Whether this rank holds the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.tensor.size() == self.whole
    }
}

/// A box of a tensor, as a view.
pub(crate) fn narrowed(tensor: &Tensor, offsets: &[i64], size: &[i64]) -> Result<Tensor> {
    let mut place = tensor.shallow_clone();
    for (dim, (offset, len)) in offsets.iter().zip(size).enumerate() {
        place = place.f_narrow(dim as i64, *offset, *len)?;
    }
    Ok(place)
}
