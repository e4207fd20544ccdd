//! PowerSGD (Vogels, Karimireddy and Jaggi, 2019): a wide gradient travels as two thin matrices.
//!
//! ```text
//!   M  n × m, of each rank        P = mean of M·Q       n × r, reduced; then its columns are made orthonormal
//!   M ≈ P·Qᵀ, on all ranks        Q = mean of Mᵀ·P      m × r, reduced; begins the next step's search (warm start)
//! ```
//! So M becomes the projection of the mean on the directions of P. What a rank's own M loses thereby it keeps, and adds to its next
//! gradient (error feedback). Gradients that would not get smaller are reduced in full, in one call with all P of the bucket.

mod memory;

use std::collections::BTreeMap;

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::TorchError;

use super::Traffic;
use super::normal::{Normal, Seeds};
use crate::ddp::{CommHook, GradBucket};
use crate::error::ParallelError;
use memory::Memory;

/// What PyTorch's `PowerSGDState` is made with, with its defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerSgdOptions {
    /// Columns of P and Q: more are more exact and more bytes. 1 to 4 are usual.
    pub matrix_approximation_rank: usize,
    /// Steps in which gradients are reduced in full first, as the beginning of a training suffers most from inexact ones. At least 2 with
    /// error feedback or warm start, since buckets change after the first step.
    pub start_power_sgd_iter: u64,
    /// A gradient is compressed if it gets smaller by more than this factor.
    pub min_compression_rate: f64,
    /// Whether what compression loses is added to the next gradient.
    pub use_error_feedback: bool,
    /// Whether Q of the last step begins the search, instead of random numbers.
    pub warm_start: bool,
    /// Added to the lengths of columns before they are divided by them.
    pub orthogonalization_epsilon: f64,
    /// Of the random numbers Q begins with; the same on all ranks.
    pub random_seed: u32,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_power_sgd_iter: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            orthogonalization_epsilon: 0.0,
            random_seed: 0,
        }
    }
}

impl PowerSgdOptions {
    fn check(&self) -> Result<(), ParallelError> {
        let Self { matrix_approximation_rank: rank, start_power_sgd_iter: start, .. } = *self;
        if rank == 0 {
            return Err(ParallelError::Unfit("a matrix cannot be approximated with rank 0; try 1".into()));
        }
        if (self.use_error_feedback || self.warm_start) && start < 2 {
            return Err(ParallelError::Unfit(format!(
                "PowerSGD with error feedback or warm start cannot begin in step {start}, as buckets change after the first step; try start_power_sgd_iter: 2"
            )));
        }
        Ok(())
    }

    /// How many columns P and Q of a gradient with these sizes have; `None` if it is not worth it.
    pub(crate) fn rank_for(&self, sizes: &[i64]) -> Option<i64> {
        let (&rows, others) = sizes.split_first().filter(|(_, others)| !others.is_empty())?;
        let columns: i64 = others.iter().product();
        let rank = rows.min(columns).min(self.matrix_approximation_rank as i64);
        let compressed = ((rows + columns) * rank) as f64;
        (compressed * self.min_compression_rate < (rows * columns) as f64).then_some(rank)
    }
}

/// Low-rank gradients with error feedback; see the [paper](https://arxiv.org/abs/1905.13727).
///
/// It begins anew with each process: after a restart from a checkpoint there are `start_power_sgd_iter` steps in full once more, and what
/// earlier gradients had lost is gone.
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    seeds: Seeds,
    step: u64,
    /// By number of the bucket.
    memories: BTreeMap<usize, Memory>,
    traffic: Traffic,
}

impl PowerSgd {
    /// A hook with these options, the same on all ranks.
    pub fn new(options: PowerSgdOptions) -> Result<Self, ParallelError> {
        options.check()?;
        let (seeds, traffic) = (Seeds::new(options.random_seed), Traffic::default());
        Ok(Self { options, seeds, step: 0, memories: BTreeMap::new(), traffic })
    }

    /// Counts what it is given and what it reduces.
    pub fn traffic(&self) -> Traffic {
        self.traffic.clone()
    }

    fn compressed(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<usize, TorchError> {
        if bucket.gradients.iter().all(|gradient| self.options.rank_for(&gradient.size()).is_none()) {
            bucket.all_reduce(group, ReduceOp::Avg)?;
            return Ok(bucket.num_bytes());
        }
        let shape = bucket.shape();
        let known = self.memories.remove(&bucket.index).filter(|memory| memory.shape == shape);
        let (mut memory, is_new) = match known {
            Some(memory) => (memory, false),
            None => (Memory::new(bucket, group, &self.options)?, true),
        };
        if is_new || !self.options.warm_start {
            memory.randomize(&mut Normal::new(self.seeds.next()))?;
        } else {
            memory.mend(&mut self.seeds)?;
        }
        let bytes = memory.reduce(bucket, group, &self.options)?;
        self.memories.insert(bucket.index, memory);
        Ok(bytes)
    }
}

impl CommHook for PowerSgd {
    fn reduce(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<(), TorchError> {
        let bytes = if self.step < self.options.start_power_sgd_iter {
            bucket.all_reduce(group, ReduceOp::Avg)?;
            bucket.num_bytes()
        } else {
            self.compressed(bucket, group)?
        };
        self.traffic.add(bucket.num_bytes(), bytes);
        if bucket.is_last() {
            self.step += 1;
            // There may have been more, before the buckets changed.
            self.memories.retain(|index, _| *index < bucket.num_buckets);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_worth_compressing() {
        let options = PowerSgdOptions { matrix_approximation_rank: 4, ..Default::default() };
        assert_eq!(options.rank_for(&[64, 64]), Some(4));
        assert_eq!(options.rank_for(&[64, 16, 2, 2]), Some(4));
        assert_eq!(options.rank_for(&[16, 16]), None, "(16 + 16) · 4 · 2 is no less than 256");
        assert_eq!(options.rank_for(&[1000]), None);
        assert_eq!(options.rank_for(&[]), None);
        assert_eq!(options.rank_for(&[0, 5]), None);
        let always = PowerSgdOptions { min_compression_rate: 0.0, ..options };
        assert_eq!(always.rank_for(&[3, 100]), Some(3));
    }

    #[test]
    fn options_that_cannot_work_are_refused() {
        let refused = |options| PowerSgd::new(options).unwrap_err().to_string();
        let options = PowerSgdOptions::default();
        assert!(
            refused(PowerSgdOptions { start_power_sgd_iter: 1, ..options })
                .contains("try start_power_sgd_iter: 2")
        );
        assert!(refused(PowerSgdOptions { matrix_approximation_rank: 0, ..options }).contains("try 1"));
        let plain = PowerSgdOptions {
            use_error_feedback: false,
            warm_start: false,
            start_power_sgd_iter: 0,
            ..options
        };
        assert!(PowerSgd::new(plain).is_ok());
    }
}
