//! A sample to make, and the random number generator for it.

/// The index of a sample, and the seeds for its randomness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The index in the data set.
    pub index: usize,
    /// A seed of the run's seed, the epoch and the index: the same on any rank and in any worker.
    pub seed: u64,
    /// A seed of the run's seed and the epoch: the same for all samples of an epoch.
    pub epoch_seed: u64,
}

impl Sample {
    /// The sample of an epoch of a run.
    pub fn new(run_seed: u64, epoch: u64, index: usize) -> Self {
        let epoch_seed = mix(mix(run_seed.wrapping_add(STEP)) ^ epoch.wrapping_add(STEP));
        Self { index, seed: mix(epoch_seed ^ (index as u64).wrapping_add(STEP)), epoch_seed }
    }

    /// A generator with the sample's seed.
    pub fn rng(&self) -> SampleRng {
        SampleRng { state: self.seed }
    }

    /// A generator with the epoch's seed, for randomness that all samples of an epoch share.
    pub fn epoch_rng(&self) -> SampleRng {
        SampleRng { state: self.epoch_seed }
    }
}

/// A small, fast random number generator (SplitMix64) for augmentation. It needs no setup and a few instructions per
/// number.
///
/// ```
/// let mut rng = drumline::data::Sample::new(42, 0, 7).rng();
/// let (left, flip) = (rng.below(9), rng.chance(0.5));
/// assert!(left < 9);
/// # let _ = flip;
/// ```
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

    /// A number from 0 to `bound` - 1, uniform up to `bound` / 2^64; 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A number from 0, inclusive, to 1, exclusive.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * f64::exp2(-53.0)
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }
}

/// 2^64 divided by the golden ratio, made odd: the step that spreads SplitMix64's states.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's mixer: each bit of the input changes about half of the output's.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_generator_is_splitmix64() {
        let mut rng = SampleRng { state: 1_234_567 };
        let first: Vec<_> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn seeds_differ_by_run_epoch_and_index() {
        let seeds = (0..4).flat_map(|run| (0..10).map(move |epoch| (run, epoch)));
        let seeds = seeds.flat_map(|(run, epoch)| (0..500).map(move |i| Sample::new(run, epoch, i).seed));
        assert_eq!(seeds.collect::<HashSet<_>>().len(), 4 * 10 * 500);
        let of_epochs = (0..4).flat_map(|run| (0..10).map(move |epoch| (run, epoch)));
        let of_epochs =
            of_epochs.flat_map(|(run, epoch)| [0, 7].map(|i| Sample::new(run, epoch, i).epoch_seed));
        assert_eq!(of_epochs.collect::<HashSet<_>>().len(), 4 * 10, "all samples of an epoch share it");
    }

    #[test]
    fn numbers_stay_in_range_and_spread_evenly() {
        let mut rng = Sample::new(0, 0, 0).rng();
        let mut counts = [0; 5];
        for _ in 0..10_000 {
            counts[rng.below(5)] += 1;
            assert!((0.0..1.0).contains(&rng.uniform()));
        }
        assert!(counts.iter().all(|count| (1800..2200).contains(count)), "{counts:?}");
        let heads = (0..10_000).filter(|_| rng.chance(0.25)).count();
        assert!((2200..2800).contains(&heads), "{heads}");
        assert_eq!(rng.below(0), 0);
    }
}
