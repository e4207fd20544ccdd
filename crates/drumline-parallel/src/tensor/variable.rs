//! Variables of layers, each with its placement along `tp`.
//!
//! ```text
//!   whole [8, 4], drawn by every rank      rank 0 keeps      rank 1 keeps
//!     Along(0)                             rows 0 to 3       rows 4 to 7
//!     Stacked(0, 2)                        rows 0 1, 4 5     rows 2 3, 6 7      two tensors [4, 4], each cut by rows
//!     Whole                                all               all
//! ```
//! Every rank draws whole tensors, one at a time, in the order in which layers are created. With the same seed on all
//! ranks, parts are those of the model that is not cut, to the bit. A rank keeps only its parts.

use tch::nn::{Init, Path, init};
use tch::{Device, Kind, Tensor, no_grad};

use super::cut::Cut;
use super::ranks::TensorParallel;
use crate::engine::{Part, Stack, Whole};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// What a rank keeps of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeps {
    /// All of it. The values and the gradient must be the same on all ranks.
    Whole,
    /// A part along this dim.
    Along(i64),
    /// A part of each of several tensors of equal size that the variable has one after the other along the dim, such as
    /// the weights of queries, keys and values.
    Stacked(i64, i64),
}

/// A variable of the whole model.
#[derive(Debug, Clone, Copy)]
pub struct Variable<'a> {
    /// Its name in its layer.
    pub name: &'a str,
    /// Its whole size.
    pub size: &'a [i64],
    /// What this rank keeps.
    pub keeps: Keeps,
}

impl TensorParallel {
    /// Creates this rank's part of a variable, with first values drawn from `how`.
    pub fn variable(&self, path: &Path<'_>, variable: Variable<'_>, how: Init) -> Result<Tensor> {
        self.variable_of(path, variable, || Ok(init(how, variable.size, Device::Cpu)))
    }

    /// The same with first values from a function that makes the whole tensor, on any device.
    pub fn variable_of(
        &self,
        path: &Path<'_>,
        variable: Variable<'_>,
        whole: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let own = self.part_of(path, variable)?;
        let values = no_grad(whole)?;
        let values = match &own {
            Some((part, size)) => no_grad(|| part.of(&values, size))?,
            None => values,
        };
        // A part must not keep the memory of the whole.
        let values = path.add(variable.name, fresh(&values, path.device())?, true);
        own.into_iter().for_each(|(part, _)| self.note(part));
        Ok(values)
    }

    /// Creates this rank's part of a variable whose values come from another rank later: nothing is drawn.
    pub fn variable_without_values(&self, path: &Path<'_>, variable: Variable<'_>) -> Result<Tensor> {
        let own = self.part_of(path, variable)?;
        let size = own.as_ref().map_or(variable.size, |(_, size)| size);
        let values = Tensor::f_empty(size, (Kind::Float, path.device()))?;
        own.iter().for_each(|(part, _)| self.note(part.clone()));
        Ok(path.add(variable.name, values, true))
    }

    /// This rank's part of a variable, and its size; `None` if it has the whole.
    fn part_of(&self, path: &Path<'_>, variable: Variable<'_>) -> Result<Option<(Part, Vec<i64>)>> {
        let Variable { name, size, keeps } = variable;
        let (dim, count) = match keeps {
            Keeps::Along(dim) => (dim, 1),
            Keeps::Stacked(dim, count) => (dim, count),
            Keeps::Whole => return Ok(None),
        };
        if count < 1 {
            let what = format!("the number of stacked tensors of `{name}`");
            return Err(ParallelError::value(what, count, "1 or more; try 1"));
        }
        if !self.is_cut() {
            return Ok(None);
        }
        let name = path.components().chain([name]).collect::<Vec<_>>().join(".");
        let len = size.get(dim as usize).copied().filter(|len| len % count == 0);
        let len = len.ok_or_else(|| {
            let expected = format!("one with a dim {dim} of {count} equal tensors");
            ParallelError::value(format!("the size of `{name}`"), format!("{size:?}"), expected)
        })?;
        let range = Cut::new(len / count, self.size()).range(self.rank());
        let (mut offsets, mut own) = (vec![0; size.len()], size.to_vec());
        offsets[dim as usize] = range.start;
        own[dim as usize] = count * (range.end - range.start);
        let whole = Whole { name, size: size.to_vec() };
        let stack = (count > 1).then_some(Stack { dim: dim as usize, count });
        Ok(Some((Part { whole, offsets, stack }, own)))
    }
}

fn fresh(values: &Tensor, device: Device) -> Result<Tensor> {
    let mut own = Tensor::f_empty(values.size(), (values.kind(), device))?;
    no_grad(|| own.f_copy_(values))?;
    Ok(own)
}
