//! A tensor's elements in host memory, for one collective.
//!
//! ```text
//!   contiguous, on the CPU ───────────────▶ its own memory
//!   other strides, a GPU, a conjugate view ─▶ a contiguous copy ─▶ (after a write) copied back
//! ```
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;

use drumline_comm::{DType, Element};
use tch::{Device, Kind, Tensor};

use super::carried::Carried;
use super::facts::{Facts, Where, facts, unwritten};
use crate::error::TorchError;
use crate::grad::mark_written;

/// A tensor whose elements a collective on the host reads or writes.
pub(super) struct Host {
    /// The tensor itself.
    tensor: Tensor,
    /// The contiguous copy whose memory is used, if there is one.
    copy: Option<Tensor>,
    data: *mut c_void,
    /// Numbers to send: twice the elements of a complex tensor.
    len: usize,
    pub(super) carried: Carried,
}

impl Host {
    /// For reading.
    pub(super) fn read(tensor: &Tensor) -> Result<Self, TorchError> {
        Self::new(tensor, &facts(tensor)?)
    }

    /// For reading and writing; call [`finish`](Self::finish) after writing.
    pub(super) fn write(tensor: &Tensor) -> Result<Self, TorchError> {
        let facts = facts(tensor)?;
        facts.check_write(tensor)?;
        Self::new(tensor, &facts)
    }

    /// A new tensor of the type of `like`, with uninitialised elements.
    pub(super) fn room(like: &Tensor, sizes: &[i64]) -> Result<Self, TorchError> {
        let mut room = unwritten(like, Where::Host, sizes)?;
        // Uninitialised memory may hold bytes that are not a valid `bool`.
        if facts(&room)?.dtype == Kind::Bool as i8 {
            let _ = room.f_zero_()?;
        }
        Self::write(&room)
    }

    fn new(tensor: &Tensor, facts: &Facts) -> Result<Self, TorchError> {
        let carried = facts.carried()?;
        let len = facts.numel * carried.lanes();
        let tensor = tensor.shallow_clone();
        let mut host = Self { tensor, copy: None, data: facts.data, len, carried };
        let direct = facts.on_host && facts.in_order;
        if !direct || !host.data.addr().is_multiple_of(carried.dtype.size()) || !host.has_valid_bools() {
            host.stage()?;
        }
        Ok(host)
    }

    /// Uses a contiguous copy from now on.
    pub(super) fn stage(&mut self) -> Result<(), TorchError> {
        let mut copy = unwritten(&self.tensor, Where::Host, &self.tensor.size())?;
        copy.f_copy_(&self.tensor.f_detach()?)?;
        if self.carried.dtype == DType::Bool {
            copy = copy.f_view_dtype(Kind::Uint8)?.f_ne(0)?;
        }
        self.data = facts(&copy)?.data;
        self.copy = Some(copy);
        Ok(())
    }

    /// Rust's `bool` must be 0 or 1; a tensor may hold any byte that is not 0 for true.
    fn has_valid_bools(&self) -> bool {
        if self.carried.dtype != DType::Bool || self.len == 0 {
            return true;
        }
        // SAFETY: the memory holds `len` elements of one byte each.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.cast::<u8>(), self.len) };
        bytes.iter().fold(0, |all, byte| all | byte) <= 1
    }

    /// The elements.
    pub(super) fn elements<T: Element>(&self) -> &[T] {
        // SAFETY: see `pointer`; nothing writes while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.pointer::<T>(), self.len) }
    }

    /// The elements, for writing.
    pub(super) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: see `pointer`; the borrow is exclusive, and tensors that share the memory have been staged.
        unsafe { std::slice::from_raw_parts_mut(self.pointer::<T>(), self.len) }
    }

    /// Points to `len` aligned numbers of type `T` in memory that `self` keeps alive. Every `bool` is 0 or 1.
    fn pointer<T: Element>(&self) -> *mut T {
        assert_eq!(T::DTYPE, self.carried.dtype, "the caller chooses `T` by `carried`");
        if self.len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { self.data.cast() }
    }

    /// Copies what was written into the tensor, if a copy was used, and reports the write to autograd.
    pub(super) fn finish(self) -> Result<(), TorchError> {
        match &self.copy {
            // The detached handle shares the tensor's version counter, so autograd sees this write.
            Some(copy) => Ok(self.tensor.f_detach()?.f_copy_(copy)?),
            None => mark_written(&self.tensor),
        }
    }

    /// The tensor of [`room`](Self::room), on that device.
    pub(super) fn into_tensor(self, device: Device) -> Result<Tensor, TorchError> {
        Ok(self.tensor.f_to_device(device)?)
    }

    /// Numbers to send.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The range of its addresses.
    pub(super) fn span(&self) -> Range<usize> {
        self.data.addr()..self.data.addr() + self.len * self.carried.dtype.size()
    }
}

/// Whether two ranges overlap.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
