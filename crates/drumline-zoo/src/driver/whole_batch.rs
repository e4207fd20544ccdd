//! A sampler that joins the batches of all ranks, for one rank that computes the steps of all of them.
//!
//! ```text
//!   rank 0   a b │ e f │ i          one rank   a b c d │ e f g h │ i
//!   rank 1   c d │ g h │
//! ```

use drumline::data::{Sampler, SamplerError, SamplerPosition};

/// One position of this sampler is one whole batch.
pub(super) struct WholeBatch {
    /// The samplers of all ranks.
    samplers: Vec<Box<dyn Sampler>>,
    batch_size: usize,
    /// Whether incomplete batches are dropped.
    drop_last: bool,
}

impl WholeBatch {
    pub(super) fn new(samplers: Vec<Box<dyn Sampler>>, batch_size: usize, drop_last: bool) -> Self {
        Self { samplers, batch_size, drop_last }
    }

    /// The number of batches in an epoch.
    pub(super) fn num_batches(&self, epoch: u64) -> usize {
        self.batches(epoch).map_or(0, |batches| batches.len())
    }

    fn batches(&self, epoch: u64) -> Result<Vec<Vec<usize>>, SamplerError> {
        let mut whole: Vec<Vec<usize>> = Vec::new();
        for sampler in &self.samplers {
            let mut own = sampler.batches_from(&sampler.start(epoch), self.batch_size)?;
            let full = sampler.positions_of_batch(self.batch_size);
            if self.drop_last {
                own.pop_if(|last| last.len() < full);
            }
            whole.resize_with(whole.len().max(own.len()), Vec::new);
            whole.iter_mut().zip(own).for_each(|(batch, own)| batch.extend(own));
        }
        Ok(whole)
    }
}

impl Sampler for WholeBatch {
    fn num_samples(&self) -> usize {
        self.samplers.first().map_or(0, |sampler| sampler.num_samples())
    }

    fn num_replicas(&self) -> usize {
        1
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        self.num_batches(position.epoch).saturating_sub(position.samples_seen)
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        Ok(self.batches_from(position, self.batch_size)?.concat())
    }

    fn batches_from(&self, position: &SamplerPosition, _: usize) -> Result<Vec<Vec<usize>>, SamplerError> {
        let mut batches = self.batches(position.epoch)?;
        batches.drain(..position.samples_seen.min(batches.len()));
        Ok(batches)
    }

    fn positions_of_batch(&self, _: usize) -> usize {
        1
    }

    fn num_positions(&self, epoch: u64) -> usize {
        self.num_batches(epoch)
    }

    fn seed(&self) -> u64 {
        self.samplers.first().map_or(0, |sampler| sampler.seed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline::data::{DistributedSampler, EvalSampler, SamplerOptions};

    #[test]
    fn a_batch_joins_the_batches_of_all_ranks() {
        let eval = |rank| Box::new(EvalSampler::new(9, 2, rank).unwrap()) as Box<dyn Sampler>;
        let whole = WholeBatch::new(vec![eval(0), eval(1)], 2, false);
        let batches = whole.batches_from(&whole.start(0), 7).unwrap();
        let own: Vec<_> =
            (0..2).map(|rank| eval(rank).batches_from(&eval(rank).start(0), 2).unwrap()).collect();
        assert_eq!(batches[0], [&own[0][0][..], &own[1][0]].concat());
        assert_eq!(batches.concat().len(), 9, "each sample once: {batches:?}");
        assert_eq!((whole.num_positions(0), whole.count_from(&whole.start(0))), (3, 3));
    }

    #[test]
    fn incomplete_batches_are_dropped_with_drop_last() {
        let options =
            SamplerOptions { num_samples: 11, num_replicas: 2, drop_last: true, ..Default::default() };
        let of = |rank| Box::new(DistributedSampler::new(SamplerOptions { rank, ..options }).unwrap());
        let whole = |drop_last| WholeBatch::new(vec![of(0), of(1)], 2, drop_last);
        assert_eq!((whole(true).num_batches(0), whole(false).num_batches(0)), (2, 3));
    }
}
