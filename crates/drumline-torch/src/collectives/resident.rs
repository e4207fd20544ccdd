//! A tensor's elements in a GPU's memory, for the time of one collective there.
//!
//! ```text
//!   contiguous, on that GPU ─▶ its own memory
//!   other strides, a view ───▶ a contiguous copy beside it ─▶ (after a write) copied back, on the current stream
//!   on the CPU ──────────────▶ a contiguous copy on the GPU ─▶ (after a write) copied back, for which the host waits
//! ```
//! So a rank whose output is on the CPU goes the same way as the others, which cannot know.

use std::ffi::c_void;

use tch::{Device, Tensor};

use super::carried::Carried;
use super::facts::{Facts, Where, facts, unwritten};
use crate::error::TorchError;
use crate::grad::written;
use crate::nccl::Span;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// A tensor whose memory a GPU's collective may use.
pub(super) struct Resident {
    tensor: Tensor,
    copy: Option<Tensor>,
    data: *mut c_void,
    len: usize,
    gpu: usize,
    /// Whether the tensor itself is on the GPU.
    is_there: bool,
    pub(super) carried: Carried,
}

impl Resident {
    /// To read only, on this GPU.
    pub(super) fn read(tensor: &Tensor, gpu: usize) -> Result<Self> {
        Self::new(tensor, &facts(tensor)?, gpu)
    }

    /// To read and write on this GPU; [`finish`](Self::finish) when it has been written.
    pub(super) fn write(tensor: &Tensor, gpu: usize) -> Result<Self> {
        let facts = facts(tensor)?;
        facts.check_write(tensor)?;
        Self::new(tensor, &facts, gpu)
    }

    /// A new tensor of the type of `like`, which is on this GPU; its elements are arbitrary until written.
    pub(super) fn room(like: &Tensor, sizes: &[i64], gpu: usize) -> Result<Self> {
        Self::write(&unwritten(like, Where::Beside, sizes)?, gpu)
    }

    fn new(tensor: &Tensor, facts: &Facts, gpu: usize) -> Result<Self> {
        let carried = facts.carried()?;
        let (len, tensor) = (facts.numel * carried.lanes(), tensor.shallow_clone());
        let is_there = facts.gpu() == Some(gpu);
        let mut resident = Self { tensor, copy: None, data: facts.data, len, gpu, is_there, carried };
        if !is_there || !facts.in_order {
            resident.stage()?;
        }
        Ok(resident)
    }

    /// Uses a contiguous copy on the GPU from here on.
    pub(super) fn stage(&mut self) -> Result {
        let mut source = self.tensor.f_detach()?;
        if !self.is_there {
            source = source.f_to_device(Device::Cuda(self.gpu))?;
        }
        let mut copy = unwritten(&source, Where::Beside, &source.size())?;
        copy.f_copy_(&source)?;
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

    /// Whether [`finish`](Self::finish) takes what was written off the GPU, and so waits for it.
    pub(super) fn leaves_gpu(&self) -> bool {
        !self.is_there
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
