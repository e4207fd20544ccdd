//! Ranks whose data ends earlier than others': they take part with nothing until all are done.
//!
//! ```text
//!   rank 0   batch  batch  batch  end          a turn begins with every rank saying whether it has a batch;
//!   rank 1   batch  Empty  Empty  end          who has none takes part in the others' collectives with nothing
//! ```

use drumline_comm::{ProcessGroup, call_site, on_behalf_of};

use crate::ddp::Ddp;
use crate::error::ParallelError;

/// One turn of a rank.
#[derive(Debug, PartialEq)]
pub enum Turn<B> {
    /// A batch to train on.
    Batch(B),
    /// This rank has run out, others have not: call [`Ddp::backward_nothing`], then step as always.
    Empty,
}

/// Among how many ranks the gradients of a turn are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Share {
    /// Among all, also those that have run out, as PyTorch does by default: each batch weighs the same to the end.
    #[default]
    AllRanks,
    /// Among those that have a batch: the last steps are as long as the others.
    RanksWithData,
}

/// Turns over batches until the last rank has run out; see [`Ddp::uneven`].
#[derive(Debug)]
pub struct Uneven<'a, M, I> {
    ddp: &'a Ddp<M>,
    batches: I,
    share: Share,
    is_done: bool,
}

impl<M> Ddp<M> {
    /// Goes through `batches`, of which every rank may have another number. All ranks get the same number of turns. A turn is one step: one
    /// backward that reduces, and as many inside [`no_sync`](Ddp::no_sync) before it as there are micro-batches.
    ///
    /// ```no_run
    /// # use drumline_parallel::{Ddp, ParallelError, Share, Turn};
    /// # use tch::{Kind, Tensor, nn};
    /// # fn epoch(model: &Ddp<nn::Linear>, batches: Vec<Tensor>) -> Result<(), ParallelError> {
    /// for turn in model.uneven(batches, Share::AllRanks) {
    ///     match turn? {
    ///         Turn::Batch(x) => model.backward(&model.forward(&x)?.mean(Kind::Float))?,
    ///         Turn::Empty => model.backward_nothing()?,
    ///     }
    ///     // optimizer.step(): on all ranks, so that all stay equal
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn uneven<I: IntoIterator>(&self, batches: I, share: Share) -> Uneven<'_, M, I::IntoIter> {
        Uneven { ddp: self, batches: batches.into_iter(), share, is_done: false }
    }
}

impl<M, I: Iterator> Uneven<'_, M, I> {
    /// Who has a batch; `None` when nobody has.
    fn agree(&self, has_batch: bool) -> Result<Option<WhoHasData>, ParallelError> {
        let group: &ProcessGroup = self.ddp.group();
        let mut all = vec![0u8; group.size()];
        group.all_gather(&[u8::from(has_batch)], &mut all)?;
        let count = all.iter().filter(|has| **has == 1).count();
        Ok(all.iter().rposition(|has| *has == 1).map(|last| WhoHasData { last, count }))
    }

    fn begin(&self, who: &WhoHasData) -> Result<(), ParallelError> {
        // Of those with data the last gives its buffers, as in PyTorch's join.
        self.ddp.begin_step(who.last)?;
        let factor = match self.share {
            Share::AllRanks => 1.0,
            Share::RanksWithData => self.ddp.group().size() as f64 / who.count as f64,
        };
        self.ddp.loss_factor.set(factor);
        Ok(())
    }
}

struct WhoHasData {
    last: usize,
    count: usize,
}

impl<M, I: Iterator> Iterator for Uneven<'_, M, I> {
    type Item = Result<Turn<I::Item>, ParallelError>;

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
    fn turn(&mut self, batch: Option<I::Item>) -> Option<Result<Turn<I::Item>, ParallelError>> {
        match self.agree(batch.is_some()) {
            Ok(Some(who)) => Some(self.begin(&who).map(|()| batch.map_or(Turn::Empty, Turn::Batch))),
            Ok(None) => {
                self.is_done = true;
                // Whoever trained last has the buffers that count.
                self.ddp.sync_buffers().err().map(Err)
            }
            Err(error) => {
                self.is_done = true;
                Some(Err(error))
            }
        }
    }
}

impl<M, I> Drop for Uneven<'_, M, I> {
    fn drop(&mut self) {
        self.ddp.buffers_of.set(0);
        self.ddp.loss_factor.set(1.0);
    }
}
