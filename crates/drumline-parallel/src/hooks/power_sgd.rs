//! PowerSGD (Vogels, Karimireddy and Jaggi, 2019): a gradient matrix is sent as two matrices of low rank.
//!
//! ```text
//!   M  n × m, of each rank        P = mean of M·Q       n × r, reduced; then its columns are made orthonormal
//!   M ≈ P·Qᵀ, on all ranks        Q = mean of Mᵀ·P      m × r, reduced; begins the next step's search (warm start)
//! ```
//! So M becomes the projection of the mean on the columns of P. Each rank keeps what its own M loses, and adds it to
//! its next gradient (error feedback). Gradients that would not get smaller are reduced in full, in one call with all P
//! of the bucket.

mod memory;

use std::collections::BTreeMap;

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::TorchError;

use super::Traffic;
use super::normal::{Normal, Seeds};
use crate::ddp::{CommHook, GradBucket};
use crate::error::ParallelError;
use memory::Memory;

/// The options of PyTorch's `PowerSGDState`, with its defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerSgdOptions {
    /// The number of columns of P and Q. More columns are more exact, and more bytes. 1 to 4 are usual.
    pub matrix_approximation_rank: usize,
    /// The number of first steps in which gradients are reduced in full, because compression hurts most at the
    /// beginning of a training. At least 2 with error feedback or warm start, because buckets change after the first
    /// step.
    pub start_power_sgd_iter: u64,
    /// A gradient is compressed if that makes it smaller by more than this factor.
    pub min_compression_rate: f64,
    /// Whether the error of the compression is added to the next gradient.
    pub use_error_feedback: bool,
    /// Whether a step starts with Q of the last step, instead of random numbers.
    pub warm_start: bool,
    /// Added to the lengths of columns before columns are divided by them.
    pub orthogonalization_epsilon: f64,
    /// The seed of the random numbers in Q; the same on all ranks.
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
            return Err(ParallelError::value("matrix_approximation_rank", 0, "at least 1"));
        }
        if (self.use_error_feedback || self.warm_start) && start < 2 {
            let expected =
                "at least 2 with error feedback or warm start, because buckets change after the first step";
            return Err(ParallelError::value("start_power_sgd_iter", start, expected));
        }
        Ok(())
    }

    /// The number of columns of P and Q for a gradient with these sizes; `None` if compression does not pay.
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
/// Its state is not saved: after a resume from a checkpoint the first `start_power_sgd_iter` steps are in full again,
/// and the errors of earlier gradients are lost.
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    seeds: Seeds,
    step: u64,
    /// By index of the bucket.
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

    /// Counts the bytes of the buckets, and those that are reduced for them.
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
            memory.replace_zero_columns(&mut self.seeds)?;
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
            // There may have been more buckets before they changed.
            self.memories.retain(|index, _| *index < bucket.num_buckets);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_compressed_only_if_it_pays() {
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
    fn invalid_options_are_errors() {
        let refused = |options| PowerSgd::new(options).unwrap_err().to_string();
        let options = PowerSgdOptions::default();
        let early = refused(PowerSgdOptions { start_power_sgd_iter: 1, ..options });
        assert!(early.starts_with("start_power_sgd_iter is 1; expected at least 2"), "{early}");
        let no_rank = refused(PowerSgdOptions { matrix_approximation_rank: 0, ..options });
        assert!(no_rank.ends_with("expected at least 1"), "{no_rank}");
        let plain = PowerSgdOptions {
            use_error_feedback: false,
            warm_start: false,
            start_power_sgd_iter: 0,
            ..options
        };
        assert!(PowerSgd::new(plain).is_ok());
    }
}
