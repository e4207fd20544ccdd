//! What a data set is, as the loader of `drumline` asks for it: its shapes, kept here until that crate has them, then gone.

use std::error::Error;

use tch::Tensor;

/// Which sample, and the seed for all that is random in making it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Its place in the data set.
    pub index: usize,
    /// Of the run's seed, the epoch and the index.
    pub seed: u64,
}

impl Sample {
    /// The sample of an epoch of a run.
    pub fn new(run_seed: u64, epoch: u64, index: usize) -> Self {
        let run = mix(mix(run_seed.wrapping_add(STEP)) ^ epoch.wrapping_add(STEP));
        Self { index, seed: mix(run ^ (index as u64).wrapping_add(STEP)) }
    }

    /// A generator with the sample's seed.
    pub fn rng(&self) -> SampleRng {
        SampleRng { state: self.seed }
    }
}

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct SampleRng {
    state: u64,
}

impl SampleRng {
    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// One of the numbers from 0 to `bound` - 1; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// From 0 up to but not 1.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * f64::exp2(-53.0)
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A sample that cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot load sample {index} ({name}): {cause}")]
pub struct SampleError {
    /// Its place in the data set.
    pub index: usize,
    /// What people know it by.
    pub name: String,
    /// Why.
    #[source]
    pub cause: Box<dyn Error + Send + Sync>,
}

impl SampleError {
    /// The sample `index`, known as `name`, cannot be made because of `cause`.
    pub fn new(
        index: usize,
        name: impl Into<String>,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { index, name: name.into(), cause: cause.into() }
    }
}

/// Images with their classes.
#[derive(Debug)]
pub struct ImageBatch {
    /// The images, f32: sample, channel, row, column.
    pub images: Tensor,
    /// The class of each, i64.
    pub labels: Tensor,
    /// The place of each in the data set.
    pub indices: Vec<usize>,
}

/// Samples by index, made into batches.
pub trait Dataset: Send + Sync {
    /// What a batch is.
    type Batch: Send;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Makes a batch of these samples, in this order. What is random must come from each sample's seed alone.
    fn batch(&self, samples: &[Sample]) -> Result<Self::Batch, SampleError>;

    /// What people know a sample by, such as the path of its file.
    fn name(&self, index: usize) -> String;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
