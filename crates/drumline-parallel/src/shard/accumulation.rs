//! How gradients of several micro-batches are accumulated: a choice between memory and communication.
//!
//! ```text
//!   own rows   each micro-batch: gradients ─ reduce-scatter ─▶ added to this rank's rows     memory of the rows
//!   all        each micro-batch: gradients added up on each rank; the last one reduces them  memory of all gradients
//! ```

use drumline_comm::{ProcessGroup, ReduceOp, available_memory};
use drumline_torch::{Named, cuda};
use tch::{Cuda, Device};

use super::Result;

/// Whole gradients are accumulated if they take at most this part of the free memory.
const PART_OF_FREE: u64 = 4;

/// How gradients of several micro-batches are accumulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// Each micro-batch is reduced, and each rank adds up its own rows: little memory, one reduction per micro-batch.
    OwnRows,
    /// Each rank adds up all its gradients, and the last micro-batch reduces them: memory for all gradients, one
    /// reduction per step.
    All,
}

/// Why gradients are accumulated in a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// The program has chosen it, or the stage does not divide gradients.
    Given,
    /// Whole gradients have `bytes` on each rank, where `free` bytes are free.
    Memory { bytes: u64, free: u64 },
}

/// A way, and the reason for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) accumulation: Accumulation,
    pub(super) reason: Reason,
}

impl Choice {
    pub(super) fn given(accumulation: Accumulation) -> Self {
        Self { accumulation, reason: Reason::Given }
    }

    fn by_memory(bytes: u64, free: u64) -> Self {
        let fits = bytes <= free / PART_OF_FREE;
        let accumulation = if fits { Accumulation::All } else { Accumulation::OwnRows };
        Self { accumulation, reason: Reason::Memory { bytes, free } }
    }

    /// Chooses by the rank that has the least free memory. All ranks of the group call it.
    pub(super) fn of(params: &[Named], device: Device, group: &ProcessGroup) -> Result<Self> {
        let bytes = |named: &Named| (named.tensor.numel() * named.tensor.kind().elt_size_in_bytes()) as u64;
        let mut free = [free_memory(device, group)?];
        group.all_reduce(&mut free, ReduceOp::Min)?;
        Ok(Self::by_memory(params.iter().map(bytes).sum(), free[0]))
    }

    /// The choice in a sentence, for a program that accumulates.
    pub(super) fn note(&self) -> String {
        let way = match self.accumulation {
            Accumulation::All => {
                "whole gradients of micro-batches are added up on each rank, and reduced once per step"
            }
            Accumulation::OwnRows => {
                "gradients are reduced in each micro-batch, and each rank adds up its own rows"
            }
        };
        match self.reason {
            Reason::Given => way.to_owned(),
            Reason::Memory { bytes, free } => {
                let [bytes, free] = [bytes, free].map(|bytes| bytes as f64 / 1e9);
                format!("{way}: whole gradients have {bytes:.2} GB, and {free:.2} GB are free for each rank")
            }
        }
    }
}

/// The free memory of a device, divided by the ranks that use it.
fn free_memory(device: Device, group: &ProcessGroup) -> Result<u64> {
    let num_ranks = group.ranks_on_node().len() as u64;
    match device {
        Device::Cuda(gpu) => {
            let memory = cuda::memory(gpu)?;
            let free = memory.free + memory.reserved.saturating_sub(memory.allocated);
            Ok(free / num_ranks.div_ceil(Cuda::device_count().max(1) as u64))
        }
        _ => Ok(available_memory().map_or(u64::MAX, |free| free / num_ranks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_accumulated_whole_if_they_take_a_quarter_of_the_free_memory() {
        assert_eq!(Choice::by_memory(1 << 30, 4 << 30).accumulation, Accumulation::All);
        let rows = Choice::by_memory((1 << 30) + 1, 4 << 30);
        assert_eq!(rows.accumulation, Accumulation::OwnRows);
        assert!(
            rows.note().contains("whole gradients have 1.07 GB, and 4.29 GB are free"),
            "{}",
            rows.note()
        );
        assert!(!Choice::given(Accumulation::All).note().contains("GB"));
    }
}
