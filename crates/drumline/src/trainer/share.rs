//! A sampler that gives each sample of an epoch once, over all ranks. No sample is repeated to make shares equal.
//!
//! The order is that of [`DistributedSampler`]. The trainer does not need equal shares, because its steps weigh
//! samples, not ranks. So one, two and four ranks use the same samples in the same steps.

use crate::data::sampler::{DistributedSampler, Sampler, SamplerError, SamplerOptions, SamplerPosition};

pub(super) struct WholeShare {
    inner: DistributedSampler,
}

impl WholeShare {
    pub(super) fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        Ok(Self { inner: DistributedSampler::new(options)? })
    }
}

impl Sampler for WholeShare {
    fn num_samples(&self) -> usize {
        self.inner.num_samples()
    }

    fn num_replicas(&self) -> usize {
        self.inner.num_replicas()
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        let SamplerOptions { num_samples, num_replicas, rank, drop_last, .. } = *self.inner.options();
        if drop_last {
            self.inner.count_from(position)
        } else {
            num_samples.saturating_sub(position.samples_seen + rank).div_ceil(num_replicas)
        }
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        let mut indices = self.inner.indices_from(position)?;
        indices.truncate(self.count_from(position));
        Ok(indices)
    }

    fn seed(&self) -> u64 {
        self.inner.seed()
    }
}

impl Sampler for Box<dyn Sampler> {
    fn num_samples(&self) -> usize {
        (**self).num_samples()
    }

    fn num_replicas(&self) -> usize {
        (**self).num_replicas()
    }

    fn count_from(&self, position: &SamplerPosition) -> usize {
        (**self).count_from(position)
    }

    fn indices_from(&self, position: &SamplerPosition) -> Result<Vec<usize>, SamplerError> {
        (**self).indices_from(position)
    }

    fn batches_from(
        &self,
        position: &SamplerPosition,
        batch_size: usize,
    ) -> Result<Vec<Vec<usize>>, SamplerError> {
        (**self).batches_from(position, batch_size)
    }

    fn positions_of_batch(&self, batch_size: usize) -> usize {
        (**self).positions_of_batch(batch_size)
    }

    fn num_positions(&self, epoch: u64) -> usize {
        (**self).num_positions(epoch)
    }

    fn seed(&self) -> u64 {
        (**self).seed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_is_taken_once_in_the_usual_order() {
        for (num_samples, world) in [(0, 2), (1, 3), (7, 2), (12, 4), (13, 4)] {
            for seen in [0, 3] {
                let options =
                    SamplerOptions { num_samples, num_replicas: world, seed: 3, ..Default::default() };
                let share = |rank| WholeShare::new(SamplerOptions { rank, ..options }).unwrap();
                let position = SamplerPosition { samples_seen: seen, ..share(0).start(2) };
                let order = DistributedSampler::new(SamplerOptions { num_replicas: 1, ..options }).unwrap();
                let mut taken = vec![None; num_samples.saturating_sub(seen)];
                for rank in 0..world {
                    let indices = share(rank).indices_from(&position).unwrap();
                    assert_eq!(indices.len(), share(rank).count_from(&position));
                    indices
                        .iter()
                        .enumerate()
                        .for_each(|(turn, index)| taken[rank + turn * world] = Some(*index));
                }
                let whole = order.indices_from(&position).unwrap();
                assert!(
                    taken.into_iter().eq(whole.into_iter().map(Some)),
                    "{num_samples} over {world} from {seen}"
                );
            }
        }
    }
}
