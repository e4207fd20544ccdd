//! Tensors with their placement along `tp` as a type, so that a wrong composition does not compile.
//!
//! | type | the ranks' tensors | their gradients |
//! |---|---|---|
//! | [`Invariant`] | equal | equal |
//! | [`Replicated`] | equal | add up to the gradient: ranks use the tensor in different work |
//! | [`Sharded`] | parts of one tensor along a dim | parts, too |
//! | [`Partial`] | add up to the tensor | equal |
//!
//! Not here: conversions between them (`convert`).

use std::marker::PhantomData;

use tch::Tensor;

use super::cut::Cut;
use super::ranks::TensorParallel;
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// All ranks have the same tensor and the same gradient.
#[derive(Debug, Clone, Copy)]
pub struct Invariant(());

/// All ranks have the same tensor; their gradients add up to its gradient.
#[derive(Debug, Clone, Copy)]
pub struct Replicated(());

/// Ranks have parts of a tensor along the dim `D`.
#[derive(Debug)]
pub struct Sharded<D> {
    cut: Cut,
    dim: PhantomData<D>,
}

/// The ranks' tensors add up to the tensor.
#[derive(Debug, Clone, Copy)]
pub struct Partial(());

// `D` is only a name, so that it need not be `Clone`.
impl<D> Clone for Sharded<D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D> Copy for Sharded<D> {}

/// A dim along which activations are cut.
pub trait Dim: std::fmt::Debug + 'static {
    /// Its index.
    fn of(tensor: &Tensor) -> i64;
}

/// The dim of the places in a text: dim 1 of `[texts, places, features]`.
#[derive(Debug)]
pub enum Sequence {}

/// The last dim: hidden features, heads, or the classes of logits.
#[derive(Debug)]
pub enum Features {}

impl Dim for Sequence {
    fn of(_: &Tensor) -> i64 {
        1
    }
}

impl Dim for Features {
    fn of(tensor: &Tensor) -> i64 {
        tensor.dim() as i64 - 1
    }
}

/// This rank's tensor, with its placement along `tp`: [`Invariant`], [`Replicated`], [`Sharded`] or [`Partial`].
///
/// What is not shared by all ranks cannot be used as if it was. A sum that was not yet made is not a loss:
///
/// ```compile_fail
/// # use drumline_parallel::tensor::{Partial, TpTensor};
/// fn loss(parts: TpTensor<Partial>) -> tch::Tensor {
///     parts.into_tensor() // only an `Invariant` tensor is the same everywhere
/// }
/// ```
/// ```
/// # use drumline_parallel::{ParallelError, tensor::{Partial, TpTensor}};
/// fn loss(parts: TpTensor<Partial>) -> Result<tch::Tensor, ParallelError> {
///     Ok(parts.sum()?.into_tensor())
/// }
/// ```
/// Only sums may follow a part of a sum, because nothing else is linear:
///
/// ```compile_fail
/// # use drumline_parallel::{ParallelError, tensor::{Partial, TpTensor}};
/// fn activated(parts: TpTensor<Partial>) -> Result<TpTensor<Partial>, ParallelError> {
///     parts.map(|parts| parts.f_gelu("tanh"))
/// }
/// ```
/// An invariant tensor gets no gradient from work that differs from rank to rank, unless it is
/// [`replicate`](TpTensor::replicate)d first:
///
/// ```compile_fail
/// # use drumline_parallel::{ParallelError, tensor::{ColumnLinear, Features, Invariant, Sharded, TpTensor}};
/// fn hidden(layer: &ColumnLinear, xs: TpTensor<Invariant>) -> Result<TpTensor<Sharded<Features>>, ParallelError> {
///     layer.forward(&xs)
/// }
/// ```
/// ```
/// # use drumline_parallel::{ParallelError, tensor::{ColumnLinear, Features, Invariant, Sharded, TpTensor}};
/// fn hidden(layer: &ColumnLinear, xs: TpTensor<Invariant>) -> Result<TpTensor<Sharded<Features>>, ParallelError> {
///     layer.forward(&xs.replicate()?)
/// }
/// ```
/// A part of the sequence is not a part of the features:
///
/// ```compile_fail
/// # use drumline_parallel::{ParallelError, tensor::{RowLinear, Sequence, Partial, Sharded, TpTensor}};
/// fn out(layer: &RowLinear, xs: TpTensor<Sharded<Sequence>>) -> Result<TpTensor<Partial>, ParallelError> {
///     layer.product(&xs)
/// }
/// ```
#[derive(Debug)]
pub struct TpTensor<P> {
    pub(super) local: Tensor,
    pub(super) tp: TensorParallel,
    pub(super) placement: P,
}

impl<P: Copy> Clone for TpTensor<P> {
    fn clone(&self) -> Self {
        self.with(self.local.shallow_clone())
    }
}

impl<P: Copy> TpTensor<P> {
    /// Another tensor with the same placement.
    pub(super) fn with(&self, local: Tensor) -> Self {
        Self { local, tp: self.tp.clone(), placement: self.placement }
    }

    /// This rank's tensor, to look at: what is computed with it has no placement.
    pub fn local(&self) -> &Tensor {
        &self.local
    }

    /// The ranks.
    pub fn ranks(&self) -> &TensorParallel {
        &self.tp
    }

    /// The sum of two tensors with the same placement.
    pub fn plus(&self, other: &Self) -> Result<Self> {
        self.check_ranks(&other.tp)?;
        Ok(self.with(self.local.f_add(&other.local)?))
    }

    fn check_ranks(&self, other: &TensorParallel) -> Result<()> {
        if self.tp.size() == other.size() {
            return Ok(());
        }
        let (got, expected) = (other.size(), format!("{}, as for the first", self.tp.size()));
        Err(ParallelError::value("the number of ranks of the second tensor", got, expected))
    }
}

/// Placements of tensors to which any operation may be applied on each rank.
pub trait Usable: Copy {}

impl Usable for Invariant {}
impl Usable for Replicated {}
impl<D> Usable for Sharded<D> {}

impl<P: Usable> TpTensor<P> {
    /// Applies an operation to the tensor of each rank. Along a dim that is cut, it must work on each element by itself.
    pub fn map(
        &self,
        body: impl FnOnce(&Tensor) -> std::result::Result<Tensor, tch::TchError>,
    ) -> Result<Self> {
        Ok(self.with(body(&self.local)?))
    }

    /// The same with any error.
    pub fn try_map<E: Into<ParallelError>>(
        &self,
        body: impl FnOnce(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> Result<Self> {
        Ok(self.with(body(&self.local).map_err(Into::into)?))
    }
}

impl TpTensor<Invariant> {
    /// A tensor that is the same on all ranks, and is used in the same way on all.
    pub fn invariant(local: Tensor, tp: &TensorParallel) -> Self {
        Self { local, tp: tp.clone(), placement: Invariant(()) }
    }

    /// The tensor, which is the same on all ranks.
    pub fn into_tensor(self) -> Tensor {
        self.local
    }
}

impl TpTensor<Replicated> {
    pub(super) fn replicated(local: Tensor, tp: &TensorParallel) -> Self {
        Self { local, tp: tp.clone(), placement: Replicated(()) }
    }
}

impl TpTensor<Partial> {
    /// A part of a sum over ranks.
    pub fn partial(local: Tensor, tp: &TensorParallel) -> Self {
        Self { local, tp: tp.clone(), placement: Partial(()) }
    }
}

impl<D: Dim> TpTensor<Sharded<D>> {
    /// This rank's part of a tensor that has `whole` elements along `D`. An error unless it has the length of its part.
    pub fn sharded(local: Tensor, whole: i64, tp: &TensorParallel) -> Result<Self> {
        let cut = tp.cut(whole);
        let (range, dim) = (cut.range(tp.rank()), D::of(&local));
        let size = local.size();
        if size.get(dim as usize).copied() != Some(range.end - range.start) {
            let expected = format!("{} elements along dim {dim}, of {whole}", range.end - range.start);
            return Err(ParallelError::value("the size of a rank's part", format!("{size:?}"), expected));
        }
        Ok(Self { local, tp: tp.clone(), placement: Sharded { cut, dim: PhantomData } })
    }

    pub(super) fn cut(&self) -> Cut {
        self.placement.cut
    }

    /// The length of the whole tensor along `D`.
    pub fn whole_len(&self) -> i64 {
        self.placement.cut.whole()
    }

    /// The place of this rank's first element along `D`.
    pub fn first(&self) -> i64 {
        self.placement.cut.range(self.tp.rank()).start
    }
}
