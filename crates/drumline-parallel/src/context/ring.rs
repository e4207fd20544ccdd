//! The ring: what travels from rank to rank while attention computes.
//!
//! ```text
//!   hop 0   rank 0 has the keys of 0, rank 1 of 1, rank 2 of 2      sends to the next rank ─┐ while it
//!   hop 1   rank 0 has the keys of 2, rank 1 of 0, rank 2 of 1      receives from the last ─┘ computes
//! ```
//! A message is one tensor in host memory. Both sides know its size from the cut. Its tag is the hop and what travels.

use std::panic::Location;

use drumline_comm::{CommError, P2p, ProcessGroup, Source, on_behalf_of};
use drumline_torch::{TorchError, bytes, bytes_mut};
use tch::{Device, Tensor};

type Result<T> = std::result::Result<T, TorchError>;

/// What travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cargo {
    KeysValues = 0,
    Gradients = 1,
}

/// The ranks in a ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring<'a> {
    pub(super) group: &'a ProcessGroup,
    pub(super) site: &'static Location<'static>,
}

/// A message to the next rank, and the size of that from the rank before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hop<'a> {
    pub(super) sent: &'a Tensor,
    pub(super) received: &'a [i64],
    pub(super) tag: (Cargo, usize),
}

impl Ring<'_> {
    /// The rank whose keys are here at a hop.
    pub(super) fn owner(&self, hop: usize) -> usize {
        (self.group.rank() + self.group.size() - hop) % self.group.size()
    }

    /// Sends and receives while `body` computes. The received tensor is where the sent one is.
    pub(super) fn travel<R>(
        &self,
        hops: &[Hop<'_>],
        body: impl FnOnce() -> Result<R>,
    ) -> Result<(Vec<Tensor>, R)> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        let sent = hops.iter().map(|hop| Ok(hop.sent.f_to_device(Device::Cpu)?.f_contiguous()?));
        let sent = sent.collect::<Result<Vec<_>>>()?;
        let room = |hop: &Hop<'_>| Ok(Tensor::f_empty(hop.received, (hop.sent.kind(), Device::Cpu))?);
        let mut received = hops.iter().map(room).collect::<Result<Vec<_>>>()?;
        let mut messages = Vec::with_capacity(2 * hops.len());
        for ((hop, sent), received) in hops.iter().zip(&sent).zip(&mut received) {
            let tag = 2 * hop.tag.1 as u64 + hop.tag.0 as u64;
            messages.push(P2p::send(bytes(sent)?, next, tag));
            messages.push(P2p::recv(bytes_mut(received)?, Source::Rank(last), tag));
        }
        let site = self.site;
        let computed = self.group.scope(|scope| {
            let travelling = scope.start(move |group| on_behalf_of(site, || group.batch(messages)));
            // The messages are waited for even if the computation fails, because the others make them.
            let computed = body();
            travelling.wait()?;
            Ok::<_, CommError>(computed)
        });
        let computed = computed??;
        let back = |(received, hop): (Tensor, &Hop<'_>)| Ok(received.f_to_device(hop.sent.device())?);
        Ok((received.into_iter().zip(hops).map(back).collect::<Result<_>>()?, computed))
    }
}
