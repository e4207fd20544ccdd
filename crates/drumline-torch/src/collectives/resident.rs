//! A tensor's elements in a GPU's memory, for the time of one collective there.
//!
//! ```text
//!   contiguous ───────────▶ its own memory
//!   other strides, a view ─▶ a contiguous copy beside it ─▶ (after a write) copied back, on the current stream
//! ```

use std::ffi::c_void;

use tch::Tensor;

use super::carried::Carried;
use super::facts::{Facts, Where, facts, unwritten, written};
use crate::error::TorchError;
use crate::nccl::Span;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// A tensor whose memory a GPU's collective may use.
pub(super) struct Resident {
    tensor: Tensor,
    copy: Option<Tensor>,
    data: *mut c_void,
    len: usize,
    pub(super) carried: Carried,
}

impl Resident {
    /// To read only.
    pub(super) fn read(tensor: &Tensor) -> Result<Self> {
        Self::new(tensor, &facts(tensor)?)
    }

    /// To read and write; [`finish`](Self::finish) when it has been written.
    pub(super) fn write(tensor: &Tensor) -> Result<Self> {
        let facts = facts(tensor)?;
        facts.check_write(tensor)?;
        Self::new(tensor, &facts)
    }

    /// A new tensor of the type of `like`, beside it; its elements are arbitrary until written.
    pub(super) fn room(like: &Tensor, sizes: &[i64]) -> Result<Self> {
        Self::write(&unwritten(like, Where::Beside, sizes)?)
    }

    fn new(tensor: &Tensor, facts: &Facts) -> Result<Self> {
        let carried = facts.carried()?;
        let (len, tensor) = (facts.numel * carried.lanes(), tensor.shallow_clone());
        let mut resident = Self { tensor, copy: None, data: facts.data, len, carried };
        if !facts.in_order {
            resident.stage()?;
        }
        Ok(resident)
    }

    /// Uses a contiguous copy from here on.
    pub(super) fn stage(&mut self) -> Result {
        let mut copy = unwritten(&self.tensor, Where::Beside, &self.tensor.size())?;
        copy.f_copy_(&self.tensor.f_detach()?)?;
        self.data = facts(&copy)?.data;
        self.copy = Some(copy);
        Ok(())
    }

    /// What NCCL is given.
    pub(super) fn span(&self) -> Span {
        Span { data: self.data, count: self.len, dtype: self.carried.dtype }
    }

    /// Its elements, one after the other, as the tensor that holds them.
    pub(super) fn flat(&self) -> Result<Tensor> {
        Ok(self.copy.as_ref().unwrap_or(&self.tensor).f_detach()?.f_view([-1])?)
    }

    /// Whether two of them have memory in common.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let end = |span: Span| span.data.addr() + span.count * span.dtype.size();
        let (a, b) = (self.span(), other.span());
        a.data.addr() < end(b) && b.data.addr() < end(a)
    }

    /// What was written becomes the tensor's, and autograd is told.
    pub(super) fn finish(self) -> Result {
        match &self.copy {
            Some(copy) => Ok(self.tensor.f_detach()?.f_copy_(copy)?),
            None => written(&self.tensor),
        }
    }

    /// After a write to [`room`](Self::room).
    pub(super) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}
