//! Ring attention: each rank has the queries, keys and values of its places, and sees the keys of all.
//!
//! ```text
//!   hop        0            1             2            of 3 ranks; rank 1 has the chunks 1 and 4 of 0 to 5
//!   keys of    1            0             2
//!   computes   own, causal  all queries,  late queries,
//!                           early keys    all keys        without a mask: all queries, all keys
//! ```
//! Backward makes the same round once more. The gradients of keys and values travel behind them, and are back at their
//! owner after the last hop. A rank has at most two blocks of keys and values, and never more scores than a tile's.

use std::panic::Location;

use drumline_comm::call_site;
use drumline_torch::{Backward, FunctionError, TorchError, autograd_function};
use tch::Tensor;

use super::block::{Block, BlockGrads, Queries, Seen, sum_kind};
use super::ranks::ContextParallel;
use super::ring::{Cargo, Hop, Ring};
use super::zigzag::ZigZag;
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, TorchError>;

/// Queries, keys and values of this rank's places: `[texts, heads, places, head size]` each.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// What asks.
    pub queries: &'a Tensor,
    /// What is compared.
    pub keys: &'a Tensor,
    /// What is returned.
    pub values: &'a Tensor,
}

/// What a place sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All places.
    None,
    /// Itself and earlier places.
    Causal,
}

/// Scaled dot-product attention of this rank's places of texts with `len` places to the places of all ranks of `cp`. All
/// ranks call it together, and backward in the same order.
#[track_caller]
pub fn ring_attention(
    cp: &ContextParallel,
    heads: Heads<'_>,
    len: i64,
    mask: Mask,
) -> std::result::Result<Tensor, ParallelError> {
    let Heads { queries, keys, values } = heads;
    let round = Round { cp: cp.clone(), cut: cp.cut(len), mask, site: call_site() };
    round.check(heads)?;
    let backward = round.clone();
    let outputs = autograd_function(
        &[queries, keys, values],
        |cx, inputs| {
            let Seen { out, lse } = round.forward(inputs)?;
            let out = out.f_to_kind(inputs[0].kind())?;
            inputs.iter().for_each(|input| cx.save(input));
            cx.save(&out);
            cx.save(&lse);
            Ok(vec![out])
        },
        move |cx, grads| backward.backward(cx, grads),
    );
    Ok(outputs?.swap_remove(0))
}

/// A round of keys and values over all ranks.
#[derive(Clone)]
struct Round {
    cp: ContextParallel,
    cut: ZigZag,
    mask: Mask,
    site: &'static Location<'static>,
}

/// The queries and keys of a block that see one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pairs {
    /// The first query; all after it take part.
    first_query: i64,
    /// The number of keys from the first one on.
    num_keys: i64,
    causal: bool,
}

impl Round {
    /// An error unless this rank has its places.
    fn check(&self, heads: Heads<'_>) -> std::result::Result<(), ParallelError> {
        let size = heads.queries.size();
        let len = self.cut.len_of(self.cp.rank());
        let is_same = [heads.keys, heads.values].iter().all(|other| other.size() == size);
        if size.len() == 4 && size[2] == len && is_same {
            return Ok(());
        }
        let expected = format!(
            "[texts, heads, {len}, head size] of queries, keys and values: the places of rank {} of {}",
            self.cp.rank(),
            self.cut.whole()
        );
        Err(ParallelError::value("the size of queries", format!("{size:?}"), expected))
    }

    /// Which pairs are computed of the keys of another rank.
    fn pairs(&self, owner: usize) -> Pairs {
        let (rank, all) = (self.cp.rank(), self.cut.len_of(owner));
        match self.mask {
            Mask::None => Pairs { first_query: 0, num_keys: all, causal: false },
            Mask::Causal if owner == rank => Pairs { first_query: 0, num_keys: all, causal: true },
            Mask::Causal if owner < rank => {
                Pairs { first_query: 0, num_keys: self.cut.early_len(owner), causal: false }
            }
            Mask::Causal => Pairs { first_query: self.cut.early_len(rank), num_keys: all, causal: false },
        }
    }

    /// The block of keys that this rank's queries see, unless there is none.
    fn block(&self, both: &Tensor, owner: usize) -> Result<Option<(Pairs, Block)>> {
        let pairs = self.pairs(owner);
        if pairs.num_keys == 0 || pairs.first_query == self.cut.len_of(self.cp.rank()) {
            return Ok(None);
        }
        let part = |nth| both.f_get(nth)?.f_narrow(2, 0, pairs.num_keys);
        Ok(Some((pairs, Block { keys: part(0)?, values: part(1)?, causal: pairs.causal })))
    }

    fn ring(&self) -> Option<Ring<'_>> {
        self.cp.group().map(|group| Ring { group, site: self.site })
    }

    /// The size of the keys and values of a rank, `like` those of another one.
    fn size_of(&self, like: &Tensor, rank: usize) -> Vec<i64> {
        let mut size = like.size();
        size[3] = self.cut.len_of(rank);
        size
    }

    fn forward(&self, inputs: &[&Tensor]) -> Result<Seen> {
        let queries = inputs[0];
        let seen = Seen::nothing(queries)?;
        let mut both = Tensor::f_stack(&inputs[1..], 0)?;
        let hops = self.cp.size();
        for hop in 0..hops {
            let owner = (self.cp.rank() + hops - hop) % hops;
            let see = || -> Result<()> {
                let Some((pairs, block)) = self.block(&both, owner)? else { return Ok(()) };
                let asking = queries.f_narrow(2, pairs.first_query, queries.size()[2] - pairs.first_query)?;
                Ok(seen.from(pairs.first_query)?.join(&block.seen(&asking)?)?)
            };
            match self.ring().filter(|_| hop + 1 < hops) {
                Some(ring) => {
                    let received = self.size_of(&both, ring.owner(hop + 1));
                    let kv = Hop { sent: &both, received: &received, tag: (Cargo::KeysValues, hop) };
                    let (mut arrived, ()) = ring.travel(&[kv], see)?;
                    both = arrived.swap_remove(0);
                }
                None => see()?,
            }
        }
        Ok(seen)
    }

    fn backward(
        &self,
        cx: &Backward,
        mut grads: Vec<Option<Tensor>>,
    ) -> std::result::Result<Vec<Option<Tensor>>, FunctionError> {
        let [queries, keys, values, out, lse] =
            [0, 1, 2, 3, 4].map(|nth: usize| cx.saved()[nth].shallow_clone());
        let grad = grads.remove(0).map_or_else(|| out.f_zeros_like(), Ok)?.f_contiguous()?;
        let kinds = [&queries, &keys, &values].map(Tensor::kind);
        let both = Tensor::f_stack(&[keys, values], 0)?;
        let sums = self.pulled(&Queries { queries, out, lse, grad }, both)?;
        let of_each = [sums.queries, sums.here.f_get(0)?, sums.here.f_get(1)?];
        let of_each = of_each.into_iter().zip(kinds).map(|(sum, kind)| Ok(Some(sum.f_to_kind(kind)?)));
        of_each.collect()
    }

    /// The gradients of this rank's queries, keys and values.
    fn pulled(&self, of: &Queries, mut both: Tensor) -> Result<Sums> {
        let mut sums = Sums::zeros(&of.queries, &both)?;
        // The sums for the keys before, which leave now.
        let mut leaving: Option<Tensor> = None;
        let hops = self.cp.size();
        for hop in 0..hops {
            let owner = (self.cp.rank() + hops - hop) % hops;
            let pull = || -> Result<Option<(Pairs, BlockGrads)>> {
                let Some((pairs, block)) = self.block(&both, owner)? else { return Ok(None) };
                Ok(Some((pairs, block.grads(&of.from(pairs.first_query)?)?)))
            };
            let (arrived, pulled) = self.hop(hop, &both, leaving.as_ref(), pull)?;
            for (cargo, tensor) in arrived {
                match cargo {
                    Cargo::KeysValues => both = tensor,
                    Cargo::Gradients => sums.here = tensor,
                }
            }
            if let Some((pairs, grads)) = pulled {
                sums.add(pairs, grads)?;
            }
            leaving = Some(sums.here.shallow_clone());
        }
        // The last hop brings the gradients of this rank's own keys and values.
        if let (Some(ring), Some(leaving)) = (self.ring(), leaving) {
            let received = self.size_of(&both, self.cp.rank());
            let home = Hop { sent: &leaving, received: &received, tag: (Cargo::Gradients, hops) };
            sums.here = ring.travel(&[home], || Ok(()))?.0.swap_remove(0);
        }
        Ok(sums)
    }

    /// Sends the keys and values that are here, and the gradients of those before, while `body` computes.
    fn hop<R>(
        &self,
        hop: usize,
        both: &Tensor,
        leaving: Option<&Tensor>,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<(Vec<(Cargo, Tensor)>, R)> {
        let Some(ring) = self.ring() else { return Ok((Vec::new(), body()?)) };
        let [following, here] = [hop + 1, hop].map(|hop| self.size_of(both, ring.owner(hop)));
        let mut hops = Vec::with_capacity(2);
        if hop + 1 < self.cp.size() {
            hops.push(Hop { sent: both, received: &following, tag: (Cargo::KeysValues, hop) });
        }
        if let Some(leaving) = leaving {
            hops.push(Hop { sent: leaving, received: &here, tag: (Cargo::Gradients, hop) });
        }
        let (arrived, computed) = ring.travel(&hops, body)?;
        Ok((hops.iter().map(|hop| hop.tag.0).zip(arrived).collect(), computed))
    }
}

/// The gradients that a rank adds up in backward.
struct Sums {
    queries: Tensor,
    /// Those of the keys and values that are here, which come one hop after them.
    here: Tensor,
}

impl Sums {
    fn zeros(queries: &Tensor, both: &Tensor) -> Result<Self> {
        let zeros = |like: &Tensor| Tensor::f_zeros(like.size(), (sum_kind(queries), like.device()));
        Ok(Self { queries: zeros(queries)?, here: zeros(both)? })
    }

    fn add(&self, pairs: Pairs, grads: BlockGrads) -> Result<()> {
        let add =
            |sum: Tensor, grad: Tensor| sum.shallow_clone().f_add_(&grad.f_to_kind(sum.kind())?).map(drop);
        let rows = self.queries.size()[2] - pairs.first_query;
        add(self.queries.f_narrow(2, pairs.first_query, rows)?, grads.queries)?;
        for (nth, grad) in [grads.keys, grads.values].into_iter().enumerate() {
            add(self.here.f_get(nth as i64)?.f_narrow(2, 0, pairs.num_keys)?, grad)?;
        }
        Ok(())
    }
}
