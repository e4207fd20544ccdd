//! Loops over batches whose number may differ between ranks.

use drumline_parallel::{Count, UnevenTurn};

use super::Accelerator;
use super::error::Result;
use super::window::{CountedBatch, Turns};
use crate::comm::shared_failure::LocalFailure;
use crate::trainer::Batch;

type CountedBatches<I> = std::iter::Map<
    I,
    fn(<I as Iterator>::Item) -> std::result::Result<CountedBatch<<I as Iterator>::Item>, LocalFailure>,
>;

/// Turns over batches until the last rank has run out of data; see [`Accelerator::join_uneven_inputs`].
pub struct JoinUnevenInputs<I: Iterator> {
    turns: Turns<I::Item, std::iter::Fuse<CountedBatches<I>>>,
    device: tch::Device,
}

impl Accelerator {
    /// Iterates over batches that this rank has loaded itself, without a prepared loader. All ranks take the same
    /// number of turns; a rank that has run out of data gets [`UnevenTurn::Empty`]. Windows are as those of a prepared
    /// loader: every sample has the same weight.
    ///
    /// ```
    /// # use drumline::tch::nn;
    /// # use drumline::Accelerator;
    /// # use drumline::accelerator::{AcceleratorError, PreparedModel, PreparedOptimizer};
    /// # use drumline::engine::UnevenTurn;
    /// # use drumline::optim::{Sgd, SgdOptions};
    /// # use drumline::tch::Tensor;
    /// # fn epoch(
    /// #     accelerator: &Accelerator,
    /// #     model: &PreparedModel<nn::Linear>,
    /// #     optimizer: &mut PreparedOptimizer<Sgd>,
    /// #     batches: Vec<(Tensor, Tensor)>,
    /// # ) -> Result<(), AcceleratorError> {
    /// for turn in accelerator.join_uneven_inputs(batches) {
    ///     match turn? {
    ///         UnevenTurn::Batch((x, y)) => accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?,
    ///         UnevenTurn::Empty => accelerator.backward_nothing()?,
    ///     }
    ///     optimizer.step()?; // on all ranks, so that all stay equal
    ///     optimizer.zero_grad()?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn join_uneven_inputs<I>(&self, batches: I) -> JoinUnevenInputs<I::IntoIter>
    where
        I: IntoIterator,
        I::Item: Batch,
    {
        let piece: fn(I::Item) -> _ = |batch: I::Item| {
            let samples = batch.num_samples();
            Ok(CountedBatch { batch, count: Count { samples, weight: samples as f64 } })
        };
        let source = batches.into_iter().map(piece).fuse();
        JoinUnevenInputs { turns: Turns::new(source, &self.shared), device: self.device() }
    }
}

impl<I: Iterator> Iterator for JoinUnevenInputs<I>
where
    I::Item: Batch,
{
    type Item = Result<UnevenTurn<I::Item>>;

    fn next(&mut self) -> Option<Self::Item> {
        let turn = self.turns.next()?;
        Some(turn.and_then(|batch| match batch {
            Some(batch) => Ok(UnevenTurn::Batch(batch.to_device(self.device)?)),
            None => Ok(UnevenTurn::Empty),
        }))
    }
}

impl<I: Iterator> std::fmt::Debug for JoinUnevenInputs<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinUnevenInputs").finish_non_exhaustive()
    }
}
