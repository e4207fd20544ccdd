//! Uneven inputs, as PyTorch's `join`: ranks that run out of data contribute zeros until all ranks are done.
//!
//! ```text
//!   rank 0   batch  batch  batch  end          a turn begins with every rank saying whether it has a batch;
//!   rank 1   batch  Empty  Empty  end          a rank without one joins the collectives with zeros
//! ```

use drumline_comm::{call_site, on_behalf_of};

use super::Ddp;
use crate::agreement::{Agreed, Brought};
use crate::error::ParallelError;

/// What a rank does in one step.
#[derive(Debug, PartialEq)]
pub enum UnevenTurn<B> {
    /// A batch to train on.
    Batch(B),
    /// This rank has run out of data, and others have not: call [`Ddp::backward_nothing`], then step the optimizer as
    /// usual.
    Empty,
}

/// By how many ranks gradients are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DivideBy {
    /// By all ranks, also those that have run out of data, as PyTorch does by default: each batch has the same
    /// weight.
    #[default]
    AllRanks,
    /// By the ranks that have a batch: the last steps are as large as the others.
    RanksWithData,
}

/// Iterates until the last rank has run out of batches; see [`Ddp::uneven`].
#[derive(Debug)]
pub struct Uneven<'a, M, I> {
    ddp: &'a Ddp<M>,
    batches: I,
    divide_by: DivideBy,
    is_done: bool,
}

impl<M> Ddp<M> {
    /// Iterates over `batches`, of which ranks may have different numbers. All ranks get the same number of turns. A
    /// turn is one step: one backward that reduces, after any number of backwards inside [`no_sync`](Ddp::no_sync).
    ///
    /// ```no_run
    /// # use drumline_parallel::{Ddp, ParallelError, DivideBy, UnevenTurn};
    /// # use tch::{Kind, Tensor, nn};
    /// # fn epoch(model: &Ddp<nn::Linear>, batches: Vec<Tensor>) -> Result<(), ParallelError> {
    /// for turn in model.uneven(batches, DivideBy::AllRanks) {
    ///     match turn? {
    ///         UnevenTurn::Batch(x) => model.backward(&model.forward(&x)?.mean(Kind::Float))?,
    ///         UnevenTurn::Empty => model.backward_nothing()?,
    ///     }
    ///     // optimizer.step(): on all ranks, so that all stay equal
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn uneven<I: IntoIterator>(&self, batches: I, divide_by: DivideBy) -> Uneven<'_, M, I::IntoIter> {
        Uneven { ddp: self, batches: batches.into_iter(), divide_by, is_done: false }
    }
}

impl<M, I: Iterator> Uneven<'_, M, I> {
    /// Begins a step with the buffers of rank `last`, the last one that has data, as in PyTorch's join.
    fn begin(&self, last: usize, num_with_data: usize) -> Result<(), ParallelError> {
        self.ddp.begin_step(last)?;
        let factor = match self.divide_by {
            DivideBy::AllRanks => 1.0,
            DivideBy::RanksWithData => self.ddp.group().size() as f64 / num_with_data as f64,
        };
        self.ddp.synced.scale_losses(factor);
        Ok(())
    }
}

impl<M, I: Iterator> Iterator for Uneven<'_, M, I> {
    type Item = Result<UnevenTurn<I::Item>, ParallelError>;

    #[track_caller]
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done {
            return None;
        }
        let batch = self.batches.next();
        on_behalf_of(call_site(), || self.turn(batch))
    }
}

impl<M, I: Iterator> Uneven<'_, M, I> {
    fn turn(&mut self, batch: Option<I::Item>) -> Option<Result<UnevenTurn<I::Item>, ParallelError>> {
        let brought = Brought { batches: usize::from(batch.is_some()), ..Brought::default() };
        let agreed = match Agreed::reach_among(self.ddp.group(), &brought) {
            Ok(agreed) => agreed,
            Err(error) => {
                self.is_done = true;
                return Some(Err(error.into()));
            }
        };
        if let Some(last) = agreed.last_with_data() {
            let begun = self.begin(last, agreed.num_with_data());
            return Some(begun.map(|()| batch.map_or(UnevenTurn::Empty, UnevenTurn::Batch)));
        }
        self.is_done = true;
        // The rank that trained last has the current buffers.
        self.ddp.sync_buffers().err().map(Err)
    }
}

impl<M, I> Drop for Uneven<'_, M, I> {
    fn drop(&mut self) {
        self.ddp.synced.use_buffers_of(0);
        self.ddp.synced.scale_losses(1.0);
    }
}
