//! A tensor's elements in GPU memory, for one collective.
//!
//! ```text
//!   contiguous, on that GPU ─▶ its own memory
//!   other strides, a view ───▶ a contiguous copy beside it ─▶ (after a write) copied back, on the current stream
//!   on the CPU ──────────────▶ a contiguous copy on the GPU ─▶ (after a write) copied back, for which the host waits
//! ```
//! So a rank whose output is on the CPU takes the same route as the other ranks, which do not know that.

use std::ffi::c_void;

use tch::{Device, Kind, Tensor};

use super::carried::Carried;
use super::facts::{Facts, Where, facts, unwritten};
use crate::error::TorchError;
use crate::grad::mark_written;
use crate::nccl::Span;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// A tensor whose memory a collective on a GPU may use.
pub(super) struct Resident {
    tensor: Tensor,
    copy: Option<Tensor>,
    data: *mut c_void,
    len: usize,
    gpu: usize,
    /// Whether the tensor itself is on the GPU.
    is_on_gpu: bool,
    pub(super) carried: Carried,
}

impl Resident {
    /// For reading on this GPU.
    pub(super) fn read(tensor: &Tensor, gpu: usize) -> Result<Self> {
        Self::new(tensor, &facts(tensor)?, gpu)
    }

    /// For reading and writing on this GPU; call [`finish`](Self::finish) after writing.
    pub(super) fn write(tensor: &Tensor, gpu: usize) -> Result<Self> {
        let facts = facts(tensor)?;
        facts.check_write(tensor)?;
        Self::new(tensor, &facts, gpu)
    }

    /// A new tensor of the type of `like`, which is on this GPU, with uninitialised elements.
    pub(super) fn room(like: &Tensor, sizes: &[i64], gpu: usize) -> Result<Self> {
        Self::write(&unwritten(like, Where::Beside, sizes)?, gpu)
    }

    fn new(tensor: &Tensor, facts: &Facts, gpu: usize) -> Result<Self> {
        let carried = facts.carried()?;
        let (len, tensor) = (facts.numel * carried.lanes(), tensor.shallow_clone());
        let is_on_gpu = facts.gpu() == Some(gpu);
        let mut resident = Self { tensor, copy: None, data: facts.data, len, gpu, is_on_gpu, carried };
        if !is_on_gpu || !facts.in_order {
            resident.stage()?;
        }
        Ok(resident)
    }

    /// Uses a contiguous copy on the GPU from now on.
    pub(super) fn stage(&mut self) -> Result {
        let mut source = self.tensor.f_detach()?;
        if !self.is_on_gpu {
            source = source.f_to_device(Device::Cuda(self.gpu))?;
        }
        let mut copy = unwritten(&source, Where::Beside, &source.size())?;
        copy.f_copy_(&source)?;
        self.data = facts(&copy)?.data;
        self.copy = Some(copy);
        Ok(())
    }

    /// The memory to pass to NCCL.
    pub(super) fn span(&self) -> Span {
        Span { data: self.data, count: self.len, dtype: self.carried.dtype }
    }

    /// Its elements as a one-dimensional tensor, without a copy.
    pub(super) fn flat(&self) -> Result<Tensor> {
        Ok(self.copy.as_ref().unwrap_or(&self.tensor).f_detach()?.f_view([-1])?)
    }

    /// Its bytes as a one-dimensional tensor, without a copy.
    pub(super) fn bytes(&self) -> Result<Tensor> {
        Ok(self.flat()?.f_view_dtype(Kind::Uint8)?)
    }

    /// Whether the memory of two tensors overlaps.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let end = |span: Span| span.data.addr() + span.count * span.dtype.size();
        let (a, b) = (self.span(), other.span());
        a.data.addr() < end(b) && b.data.addr() < end(a)
    }

    /// Whether [`finish`](Self::finish) copies from the GPU to the host, and so waits for the GPU.
    pub(super) fn leaves_gpu(&self) -> bool {
        !self.is_on_gpu
    }

    /// Copies what was written into the tensor, if a copy was used, and reports the write to autograd.
    pub(super) fn finish(self) -> Result {
        match &self.copy {
            Some(copy) => Ok(self.tensor.f_detach()?.f_copy_(copy)?),
            None => mark_written(&self.tensor),
        }
    }

    /// The tensor of [`room`](Self::room).
    pub(super) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

/// An output and an input of the same type, one of which has as many elements as all ranks' of the other. Unless the
/// shorter is this rank's part of the longer, their memory does not overlap.
pub(super) fn whole_and_part(
    output: &Tensor,
    input: &Tensor,
    rank: usize,
    gpu: usize,
) -> Result<(Resident, Resident)> {
    let (output, mut input) = (Resident::write(output, gpu)?, Resident::read(input, gpu)?);
    super::same_carried(input.carried, output.carried)?;
    let (a, b) = (output.span(), input.span());
    let (part, whole) = if a.count < b.count { (a, b) } else { (b, a) };
    let own_part = whole.data.addr() + rank * part.count * part.dtype.size();
    if output.overlaps(&input) && part.data.addr() != own_part {
        input.stage()?;
    }
    Ok((output, input))
}
