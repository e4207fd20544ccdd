//! A tensor's elements in host memory, for the time of one collective.
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
use torch_sys::C_tensor;

use super::carried::Carried;
use crate::error::TorchError;
use crate::status::{Message, check};

/// What the shim says of a tensor.
#[repr(C)]
struct Facts {
    data: *mut c_void,
    numel: usize,
    dtype: i8,
    plain: bool,
    direct: bool,
    overlapping: bool,
    in_graph: bool,
}

unsafe extern "C" {
    fn drumline_tensor_facts(tensor: *mut C_tensor, facts: *mut Facts) -> Message;
    fn drumline_tensor_written(tensor: *mut C_tensor) -> Message;
    fn drumline_tensor_room(
        like: *mut C_tensor,
        sizes: *const i64,
        dims: usize,
        out: *mut *mut C_tensor,
    ) -> Message;
}

/// A tensor whose elements can be read, and written if it was taken for that.
pub(super) struct Host {
    /// The tensor itself.
    tensor: Tensor,
    /// The tensor whose memory is used, if not its own.
    copy: Option<Tensor>,
    data: *mut c_void,
    /// Numbers that travel, which is twice the elements of a complex tensor.
    len: usize,
    pub(super) carried: Carried,
}

impl Host {
    /// To read only.
    pub(super) fn read(tensor: &Tensor) -> Result<Self, TorchError> {
        Self::new(tensor, &facts(tensor)?)
    }

    /// To read and write; [`finish`](Self::finish) when it has been written.
    pub(super) fn write(tensor: &Tensor) -> Result<Self, TorchError> {
        let facts = facts(tensor)?;
        if facts.overlapping {
            return Err(TorchError::Unfit(format!(
                "a tensor of {:?} with strides {:?} has several elements in one place and cannot be written; try contiguous()",
                tensor.size(),
                tensor.stride()
            )));
        }
        if facts.in_graph {
            return Err(TorchError::Unfit(
                "this tensor is part of a graph, and collectives have no gradient; try detach(), or no_grad"
                    .into(),
            ));
        }
        Self::new(tensor, &facts)
    }

    /// A new tensor of the type of `like`; its elements are arbitrary until written.
    pub(super) fn room(like: &Tensor, sizes: &[i64]) -> Result<Self, TorchError> {
        let mut room = unwritten(like, sizes)?;
        // Memory that is not yet written may hold bytes that are no truths.
        if facts(&room)?.dtype == Kind::Bool as i8 {
            let _ = room.f_zero_()?;
        }
        Self::write(&room)
    }

    fn new(tensor: &Tensor, facts: &Facts) -> Result<Self, TorchError> {
        if !facts.plain {
            return Err(TorchError::Unfit(
                "sparse tensors and tensors without memory do not travel; try to_dense()".into(),
            ));
        }
        let carried = Carried::of(facts.dtype)?;
        let len = facts.numel * carried.lanes();
        let tensor = tensor.shallow_clone();
        let mut host = Self { tensor, copy: None, data: facts.data, len, carried };
        if !facts.direct || !host.data.addr().is_multiple_of(carried.dtype.size()) || !host.has_true_truths()
        {
            host.stage()?;
        }
        Ok(host)
    }

    /// Uses a contiguous copy from here on.
    pub(super) fn stage(&mut self) -> Result<(), TorchError> {
        let mut copy = unwritten(&self.tensor, &self.tensor.size())?;
        copy.f_copy_(&self.tensor.f_detach()?)?;
        if self.carried.dtype == DType::Bool {
            copy = copy.f_view_dtype(Kind::Uint8)?.f_ne(0)?;
        }
        self.data = facts(&copy)?.data;
        self.copy = Some(copy);
        Ok(())
    }

    /// Rust's `bool` may only be 0 or 1; in a tensor any byte can be made to stand for a truth.
    fn has_true_truths(&self) -> bool {
        if self.carried.dtype != DType::Bool || self.len == 0 {
            return true;
        }
        // SAFETY: the memory holds `len` elements of one byte each.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.cast::<u8>(), self.len) };
        bytes.iter().fold(0, |all, byte| all | byte) <= 1
    }

    /// The elements.
    pub(super) fn elements<T: Element>(&self) -> &[T] {
        // SAFETY: see `pointer`; nothing writes while `self` is lent.
        unsafe { std::slice::from_raw_parts(self.pointer::<T>(), self.len) }
    }

    /// The elements, to write.
    pub(super) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: see `pointer`; `self` is lent alone, and others that share the memory have been staged.
        unsafe { std::slice::from_raw_parts_mut(self.pointer::<T>(), self.len) }
    }

    /// To `len` numbers of type `T` in memory that `self` keeps, aligned, and with truths that are 0 or 1.
    fn pointer<T: Element>(&self) -> *mut T {
        assert_eq!(T::DTYPE, self.carried.dtype, "the caller goes by `carried`");
        if self.len == 0 { std::ptr::NonNull::dangling().as_ptr() } else { self.data.cast() }
    }

    /// What was written becomes the tensor's, and autograd is told.
    pub(super) fn finish(mut self) -> Result<(), TorchError> {
        match &self.copy {
            // The detached handle shares the count of writes, so autograd learns of this one.
            Some(copy) => Ok(self.tensor.f_detach()?.f_copy_(copy)?),
            // SAFETY: the handle is good for the call.
            None => check(
                unsafe { drumline_tensor_written(self.tensor.as_mut_ptr()) },
                "cannot tell autograd of a write",
            ),
        }
    }

    /// After a write to [`room`](Self::room): the tensor, on that device.
    pub(super) fn into_tensor(self, device: Device) -> Result<Tensor, TorchError> {
        Ok(self.tensor.f_to_device(device)?)
    }

    /// Numbers that travel.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The addresses it uses.
    pub(super) fn span(&self) -> Range<usize> {
        self.data.addr()..self.data.addr() + self.len * self.carried.dtype.size()
    }
}

fn facts(tensor: &Tensor) -> Result<Facts, TorchError> {
    let mut facts = Facts {
        data: std::ptr::null_mut(),
        numel: 0,
        dtype: 0,
        plain: false,
        direct: false,
        overlapping: false,
        in_graph: false,
    };
    // SAFETY: the handle is good for the call, which fills the struct.
    let message = unsafe { drumline_tensor_facts(tensor.as_ptr().cast_mut(), &mut facts) };
    check(message, "cannot use a tensor in a collective")?;
    Ok(facts)
}

/// A contiguous tensor in host memory, of the type of `like`.
fn unwritten(like: &Tensor, sizes: &[i64]) -> Result<Tensor, TorchError> {
    let mut out = std::ptr::null_mut();
    // SAFETY: `like` and `sizes` are good for the call; what comes back is a new handle, ours.
    unsafe {
        let message = drumline_tensor_room(like.as_ptr().cast_mut(), sizes.as_ptr(), sizes.len(), &mut out);
        check(message, "cannot make room for a collective")?;
        Ok(Tensor::from_ptr(out))
    }
}

/// Whether two ranges have something in common.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
