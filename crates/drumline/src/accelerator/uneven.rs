//! Loops over batches of which every rank may have another number.

use drumline_parallel::Turn as ParallelTurn;

use super::Accelerator;
use super::error::Result;
use super::window::{Count, Piece, Turns};
use crate::shared_failure::Trouble;
use crate::trainer::Batch;

type Pieces<I> = std::iter::Map<
    I,
    fn(<I as Iterator>::Item) -> std::result::Result<Piece<<I as Iterator>::Item>, Trouble>,
>;

/// Turns over batches until the last rank has run out; see [`Accelerator::join_uneven_inputs`].
pub struct JoinUnevenInputs<I: Iterator> {
    turns: Turns<I::Item, std::iter::Fuse<Pieces<I>>>,
    device: tch::Device,
}

impl Accelerator {
    /// Goes through batches that this rank has got by itself, without a prepared loader. All ranks take as many turns; one that has run out gets
    /// [`Turn::Empty`](crate::Turn::Empty). Windows are as those of a prepared loader: every sample weighs the same.
    ///
    /// ```
    /// # use drumline::tch::nn;
    /// # use drumline::{Accelerator, AcceleratorError, Sgd, SgdOptions, Turn, accelerator::{PreparedModel, PreparedOptimizer}};
    /// # use drumline::tch::Tensor;
    /// # fn epoch(accelerator: &Accelerator, model: &PreparedModel<nn::Linear>, optimizer: &mut PreparedOptimizer<Sgd>, batches: Vec<(Tensor, Tensor)>) -> Result<(), AcceleratorError> {
    /// for turn in accelerator.join_uneven_inputs(batches) {
    ///     match turn? {
    ///         Turn::Batch((x, y)) => accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?,
    ///         Turn::Empty => accelerator.backward_nothing()?,
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
            Ok(Piece { batch, count: Count { samples, weight: samples as f64 } })
        };
        let source = batches.into_iter().map(piece).fuse();
        JoinUnevenInputs { turns: Turns::new(source, &self.shared), device: self.device() }
    }
}

impl<I: Iterator> Iterator for JoinUnevenInputs<I>
where
    I::Item: Batch,
{
    type Item = Result<ParallelTurn<I::Item>>;

    fn next(&mut self) -> Option<Self::Item> {
        let turn = self.turns.next()?;
        Some(turn.and_then(|batch| match batch {
            Some(batch) => Ok(ParallelTurn::Batch(batch.to_device(self.device)?)),
            None => Ok(ParallelTurn::Empty),
        }))
    }
}

impl<I: Iterator> std::fmt::Debug for JoinUnevenInputs<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinUnevenInputs").finish_non_exhaustive()
    }
}
