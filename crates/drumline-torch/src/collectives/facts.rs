//! What a collective needs to know about a tensor before it uses its memory.
#![allow(unsafe_code)]

use std::ffi::c_void;

use tch::Tensor;
use torch_sys::C_tensor;

use super::carried::Carried;
use crate::error::TorchError;
use crate::status::{Message, check};

/// What the shim reports about a tensor.
#[repr(C)]
pub(super) struct Facts {
    pub(super) data: *mut c_void,
    pub(super) numel: usize,
    pub(super) dtype: i8,
    gpu: i16,
    plain: bool,
    pub(super) on_host: bool,
    pub(super) in_order: bool,
    overlapping: bool,
    in_graph: bool,
}

unsafe extern "C" {
    fn drumline_tensor_facts(tensor: *mut C_tensor, facts: *mut Facts) -> Message;
    fn drumline_tensor_room(
        like: *mut C_tensor,
        on_host: bool,
        sizes: *const i64,
        dims: usize,
        out: *mut *mut C_tensor,
    ) -> Message;
}

/// Where a new tensor is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    Host,
    /// On the device of the other tensor.
    Beside,
}

impl Facts {
    /// The index of its GPU, if it is on one.
    pub(super) fn gpu(&self) -> Option<usize> {
        usize::try_from(self.gpu).ok()
    }

    /// How its elements are sent.
    pub(super) fn carried(&self) -> Result<Carried, TorchError> {
        if !self.plain {
            return Err(TorchError::Unsupported {
                operation: "use a tensor in a collective",
                reason: "it is sparse, or has no memory; try to_dense()",
            });
        }
        Carried::of(self.dtype)
    }

    /// An error if `tensor`, which these facts describe, cannot be written.
    pub(super) fn check_write(&self, tensor: &Tensor) -> Result<(), TorchError> {
        if self.overlapping {
            return Err(TorchError::Strides {
                what: "the output of a collective".to_owned(),
                problem: "several elements in one place",
                shape: tensor.size(),
                strides: tensor.stride(),
                hint: "contiguous()",
            });
        }
        if self.in_graph {
            return Err(TorchError::Unsupported {
                operation: "write the result of a collective",
                reason: "the tensor is part of an autograd graph, and collectives have no gradient; \
                         try detach(), or no_grad",
            });
        }
        Ok(())
    }
}

pub(super) fn facts(tensor: &Tensor) -> Result<Facts, TorchError> {
    let mut facts = Facts {
        data: std::ptr::null_mut(),
        numel: 0,
        dtype: 0,
        gpu: -1,
        plain: false,
        on_host: false,
        in_order: false,
        overlapping: false,
        in_graph: false,
    };
    // SAFETY: the handle is valid for the call, which fills the struct.
    let message = unsafe { drumline_tensor_facts(tensor.as_ptr().cast_mut(), &mut facts) };
    check(message, "cannot use a tensor in a collective")?;
    Ok(facts)
}

/// A contiguous, uninitialised tensor of the type of `like`.
pub(super) fn unwritten(like: &Tensor, place: Where, sizes: &[i64]) -> Result<Tensor, TorchError> {
    let (mut out, like) = (std::ptr::null_mut(), like.as_ptr().cast_mut());
    // SAFETY: `like` and `sizes` are valid for the call; the result is a new handle that we own.
    unsafe {
        let message = drumline_tensor_room(like, place == Where::Host, sizes.as_ptr(), sizes.len(), &mut out);
        check(message, "cannot allocate a tensor for a collective")?;
        Ok(Tensor::from_ptr(out))
    }
}
