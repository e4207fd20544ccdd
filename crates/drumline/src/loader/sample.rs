//! A sample to be made, and the generator for what is random in it.

/// Which sample, and the seed for all that is random in making it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Its place in the data set.
    pub index: usize,
    /// Of the run's seed, the epoch and the index: the same on any rank and in any worker.
    pub seed: u64,
    /// Of the run's seed and the epoch: the same for all samples of an epoch.
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

    /// A generator for what is random of the epoch as a whole.
    pub fn epoch_rng(&self) -> SampleRng {
        SampleRng { state: self.epoch_seed }
    }
}

/// A small fast generator (SplitMix64), good for augmentation: nothing to set up, a few instructions a number.
///
/// ```
/// let mut rng = drumline::Sample::new(42, 0, 7).rng();
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

    /// One of the numbers from 0 to `bound` - 1, all equally likely but for less than `bound` / 2^64; 0 if `bound` is 0.
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
        assert_eq!(of_epochs.collect::<HashSet<_>>().len(), 4 * 10, "one for all samples of an epoch");
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
