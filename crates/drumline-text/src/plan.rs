//! The batches of an epoch, the same on all ranks.
//!
//! ```text
//!   samples 0 … n-1 ─ shuffle ─▶ one order ─ buffers of 5000 ─▶ each sorted by length, with noise ─▶ cut into batches
//! ```
//! A *buffer* is a run of consecutive samples. Within a buffer, samples are sorted by length (`bucket`), so that batches need
//! little padding. Consecutive batches then have similar lengths, so ranks that take every n-th batch have similar work.
//!
//! As in NJUNMT, the length of a pair is that of its longer side, plus random noise of less than one token, so that batches
//! differ from epoch to epoch. Unlike in NJUNMT, the shuffle is over the whole corpus and not over a buffer, and a batch by
//! tokens never exceeds its limit.

use crate::random::Random;

/// What the size of a batch counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchBy {
    /// This many samples; only the last batch may have fewer.
    Samples(usize),
    /// At most this many tokens, padding included: the longest side in the batch times its number of samples. A sample that
    /// is longer than the limit is a batch of its own.
    Tokens(usize),
}

/// How the samples of an epoch are put into batches. A size of 0 counts as 1.
///
/// ```
/// use drumline_text::{BatchBy, BatchPlan};
///
/// let lengths = [(3, 4), (9, 8), (3, 3), (8, 8)];
/// let plan = BatchPlan::new(BatchBy::Tokens(18));
/// let batches = plan.batches(&lengths, 0);
/// assert_eq!(batches.len(), 2);
/// assert!(batches[0].contains(&0) && batches[0].contains(&2), "short ones together");
/// assert_eq!(batches, plan.batches(&lengths, 0));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPlan {
    /// The size of a batch.
    pub by: BatchBy,
    /// Sort samples by length, so that a batch has samples of similar length.
    pub bucket: bool,
    /// The number of consecutive samples that `bucket` sorts; `usize::MAX` sorts all.
    pub buffer: usize,
    /// Put the samples into another order each epoch.
    pub shuffle: bool,
    /// The seed of the shuffle and of the noise.
    pub seed: u64,
}

impl BatchPlan {
    /// NJUNMT's defaults: buckets within buffers of 5000, no shuffle, seed 1234.
    pub fn new(by: BatchBy) -> Self {
        Self { by, bucket: true, buffer: 5000, shuffle: false, seed: 1234 }
    }

    /// The batches of an epoch. Each sample is in exactly one. They depend only on the plan, the lengths and the epoch.
    pub fn batches(&self, lengths: &[(u32, u32)], epoch: u64) -> Vec<Vec<usize>> {
        let mut random = Random::new(self.seed, epoch);
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        if self.shuffle {
            random.shuffle(&mut order);
        }
        if self.bucket {
            for buffer in order.chunks_mut(self.buffer.max(1)) {
                sort_by_noisy_length(buffer, lengths, &mut random);
            }
        }
        match self.by {
            BatchBy::Samples(samples) => order.chunks(samples.max(1)).map(<[usize]>::to_vec).collect(),
            BatchBy::Tokens(tokens) => cut_by_tokens(&order, lengths, tokens as u64),
        }
    }
}

fn longer_side(lengths: &[(u32, u32)], sample: usize) -> u64 {
    let (source, target) = lengths[sample];
    u64::from(source.max(target))
}

fn sort_by_noisy_length(buffer: &mut [usize], lengths: &[(u32, u32)], random: &mut Random) {
    let noisy = |sample: &usize| longer_side(lengths, *sample) as f64 + 2.0 * random.uniform() - 1.0;
    let mut keyed: Vec<_> = buffer.iter().map(noisy).zip(buffer.iter().copied()).collect();
    keyed.sort_unstable_by(|(a, i), (b, j)| a.total_cmp(b).then(i.cmp(j)));
    buffer.iter_mut().zip(keyed).for_each(|(place, (_, sample))| *place = sample);
}

fn cut_by_tokens(order: &[usize], lengths: &[(u32, u32)], tokens: u64) -> Vec<Vec<usize>> {
    let mut batches = Vec::new();
    let mut batch = Vec::new();
    let mut widest = 0;
    for sample in order {
        let width = longer_side(lengths, *sample).max(widest);
        if !batch.is_empty() && width * (batch.len() as u64 + 1) > tokens {
            batches.push(std::mem::take(&mut batch));
            widest = 0;
        }
        widest = widest.max(longer_side(lengths, *sample));
        batch.push(*sample);
    }
    if !batch.is_empty() {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plans() -> impl Strategy<Value = BatchPlan> {
        let by =
            prop_oneof![(0..40_usize).prop_map(BatchBy::Samples), (0..200_usize).prop_map(BatchBy::Tokens)];
        let buffer = prop_oneof![0..50_usize, Just(usize::MAX)];
        (by, any::<bool>(), buffer, any::<bool>(), any::<u64>())
            .prop_map(|(by, bucket, buffer, shuffle, seed)| BatchPlan { by, bucket, buffer, shuffle, seed })
    }

    fn some_lengths() -> impl Strategy<Value = Vec<(u32, u32)>> {
        prop::collection::vec((0..90_u32, 0..90_u32), 0..300)
    }

    proptest! {
        #[test]
        fn each_sample_once_the_same_everywhere_within_limits(
            plan in plans(), lengths in some_lengths(), epoch in any::<u64>(),
        ) {
            let batches = plan.batches(&lengths, epoch);
            prop_assert_eq!(&batches, &plan.clone().batches(&lengths.clone(), epoch), "another rank");
            let mut all = batches.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..lengths.len()), "each once");
            for (number, batch) in batches.iter().enumerate() {
                prop_assert!(!batch.is_empty());
                let width = batch.iter().map(|sample| longer_side(&lengths, *sample)).max().unwrap();
                match plan.by {
                    BatchBy::Tokens(n) => {
                        prop_assert!(batch.len() == 1 || width * batch.len() as u64 <= n as u64);
                    }
                    BatchBy::Samples(n) => {
                        prop_assert!(batch.len() == n.max(1) || number + 1 == batches.len());
                        prop_assert!(batch.len() <= n.max(1));
                    }
                }
            }
        }

        #[test]
        fn buckets_stay_within_their_buffers(lengths in some_lengths(), buffer in 1..50_usize) {
            let plan = BatchPlan { buffer, ..BatchPlan::new(BatchBy::Samples(1)) };
            let order = plan.batches(&lengths, 3).concat();
            for (number, found) in order.chunks(buffer).enumerate() {
                let whole = number * buffer..(number * buffer + found.len());
                let mut sorted = found.to_vec();
                sorted.sort_unstable();
                prop_assert!(sorted.into_iter().eq(whole));
                for pair in found.windows(2) {
                    prop_assert!(longer_side(&lengths, pair[0]) < longer_side(&lengths, pair[1]) + 2);
                }
            }
        }
    }

    #[test]
    fn without_shuffle_and_bucket_samples_keep_the_order_of_the_files() {
        let plan = BatchPlan { bucket: false, ..BatchPlan::new(BatchBy::Samples(4)) };
        let lengths: Vec<_> = (0..10).map(|i| (10 - i, 1)).collect();
        assert_eq!(plan.batches(&lengths, 5).concat(), (0..10).collect::<Vec<_>>());
        assert!(plan.batches(&[], 0).is_empty());
    }

    #[test]
    fn seed_and_epoch_change_the_order_and_buckets_save_padding() {
        let lengths: Vec<_> = (0..1000).map(|i| (1 + i * 7919 % 60, 1 + i * 104_729 % 60)).collect();
        let plan = BatchPlan { shuffle: true, ..BatchPlan::new(BatchBy::Tokens(600)) };
        let other_seed = BatchPlan { seed: 1, ..plan.clone() };
        let first = plan.batches(&lengths, 0);
        assert!(first != plan.batches(&lengths, 1) && first != other_seed.batches(&lengths, 0));
        let unsorted = BatchPlan { bucket: false, ..plan };
        assert!(unsorted.batches(&lengths, 0).len() as f64 > 1.2 * first.len() as f64);
    }
}
