//! Tensors of all ranks, gathered, reduced or padded.

use drumline_comm::ReduceOp;
use drumline_torch::{TensorCollectives, nccl};
use tch::Tensor;

use super::Accelerator;
use super::error::Result;
use crate::comm::shared_failure::SharedFailure;

/// How [`Accelerator::pad_across_processes`] pads tensors to the length of the longest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Padding {
    /// The dimension that is padded.
    pub dim: i64,
    /// The value of the padding.
    pub value: f64,
    /// Which end is padded.
    pub at: PadAt,
}

impl Default for Padding {
    fn default() -> Self {
        Self { dim: 0, value: 0.0, at: PadAt::End }
    }
}

/// The end of a dimension that is padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PadAt {
    /// After the tensor's own values.
    End,
    /// Before the tensor's own values.
    Begin,
}

impl Accelerator {
    /// Concatenates the tensors of all ranks along the first dimension, in rank order. They may differ in length. A
    /// scalar counts as a list of one.
    #[track_caller]
    pub fn gather(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(Tensor::f_cat(&self.parts(&as_list(tensor)?)?, 0)?)
    }

    /// As [`gather`](Self::gather), for results of this turn's batches. Results of filler batches are left out. Rows,
    /// one for each sample, are in the order in which the loader gives samples to one process.
    #[track_caller]
    pub fn gather_for_metrics(&self, tensor: &Tensor) -> Result<Tensor> {
        let turn = self.shared.turn();
        let own = as_list(tensor)?;
        let own = if turn.factor.is_some() { own } else { own.f_narrow(0, 0, 0)? };
        let parts = self.parts(&own)?;
        let lens: Vec<usize> = parts.iter().map(|part| part.size()[0] as usize).collect();
        let whole = Tensor::f_cat(&parts, 0)?;
        if lens != turn.samples {
            return Ok(whole);
        }
        let order = Tensor::from_slice(&interleaved(&lens)).to_device(whole.device());
        Ok(whole.f_index_select(0, &order)?)
    }

    fn parts(&self, own: &Tensor) -> Result<Vec<Tensor>> {
        nccl::check()?;
        Ok(self.group().all_gather_uneven_tensor(own)?)
    }

    /// Reduces the tensors of all ranks, which have the same size. Every rank gets the result.
    #[track_caller]
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        nccl::check()?;
        let mut reduced = tensor.detach().copy();
        self.group().all_reduce_tensor(&mut reduced, op)?;
        Ok(reduced)
    }

    /// Pads this rank's tensor along one dimension to the length of the longest of all ranks.
    #[track_caller]
    pub fn pad_across_processes(&self, tensor: &Tensor, padding: Padding) -> Result<Tensor> {
        let size = tensor.size();
        // Every rank returns an error if one rank's tensor has no such dimension.
        let all = self.group().all_gather_object(&size)?;
        let dim_in = |size: &[i64]| {
            let num_dims = size.len() as i64;
            let dim = if padding.dim < 0 { padding.dim + num_dims } else { padding.dim };
            (0..num_dims).contains(&dim).then_some(dim as usize)
        };
        if let Some((rank, size)) = all.iter().enumerate().find(|(_, size)| dim_in(size).is_none()) {
            return Err(SharedFailure::on_all_ranks(format!(
                "cannot pad along dimension {}: the tensor of rank {rank} has none, its size is {size:?}; try another dimension",
                padding.dim
            ))
            .into());
        }
        let Some(dim) = dim_in(&size) else { return Ok(tensor.shallow_clone()) };
        let longest = all.iter().filter_map(|size| Some(size[dim_in(size)?])).max().unwrap_or(0);
        let mut padded_size = size.clone();
        padded_size[dim] = longest;
        let padded =
            tensor.detach().f_new_full(padded_size, padding.value, (tensor.kind(), tensor.device()))?;
        let len = size[dim];
        let begin = if padding.at == PadAt::End { 0 } else { longest - len };
        padded.f_narrow(dim as i64, begin, len)?.f_copy_(&tensor.detach())?;
        Ok(padded)
    }
}

/// A scalar as a list of one.
fn as_list(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.detach();
    Ok(if tensor.dim() == 0 { tensor.f_view([1])? } else { tensor })
}

/// The row indices that restore the order in which ranks took samples in turn, where the rows of each rank lie
/// together.
fn interleaved(lens: &[usize]) -> Vec<i64> {
    let begins: Vec<usize> =
        lens.iter().scan(0, |sum, len| Some(std::mem::replace(sum, *sum + len))).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let row = |row: usize| {
        let has = lens.iter().zip(&begins).filter(move |(len, _)| row < **len);
        has.map(move |(_, begin)| (begin + row) as i64)
    };
    (0..longest).flat_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_ranks_alternate() {
        assert_eq!(interleaved(&[3, 2, 2]), [0, 3, 5, 1, 4, 6, 2]);
        assert_eq!(interleaved(&[1, 0]), [0]);
        assert!(interleaved(&[0, 0]).is_empty());
    }
}
