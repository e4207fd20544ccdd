//! What a collective must know of a tensor before it may touch its memory.
#![allow(unsafe_code)]

use std::ffi::c_void;

use tch::Tensor;
use torch_sys::C_tensor;

use super::carried::Carried;
use crate::error::TorchError;
use crate::status::{Message, check};

/// What the shim says of a tensor.
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

/// Where a new tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    Host,
    /// Where the other one is.
    Beside,
}

impl Facts {
    /// The number of the GPU that it is on, if it is on one.
    pub(super) fn gpu(&self) -> Option<usize> {
        usize::try_from(self.gpu).ok()
    }

    /// How its elements travel.
    pub(super) fn carried(&self) -> Result<Carried, TorchError> {
        if !self.plain {
            return Err(TorchError::Unfit(
                "sparse tensors and tensors without memory do not travel; try to_dense()".into(),
            ));
        }
        Carried::of(self.dtype)
    }

    /// An error if `tensor`, whose facts these are, cannot be written.
    pub(super) fn check_write(&self, tensor: &Tensor) -> Result<(), TorchError> {
        if self.overlapping {
            return Err(TorchError::Unfit(format!(
                "a tensor of {:?} with strides {:?} has several elements in one place and cannot be written; try contiguous()",
                tensor.size(),
                tensor.stride()
            )));
        }
        if self.in_graph {
            return Err(TorchError::Unfit(
                "this tensor is part of a graph, and collectives have no gradient; try detach(), or no_grad"
                    .into(),
            ));
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
    // SAFETY: the handle is good for the call, which fills the struct.
    let message = unsafe { drumline_tensor_facts(tensor.as_ptr().cast_mut(), &mut facts) };
    check(message, "cannot use a tensor in a collective")?;
    Ok(facts)
}

/// A contiguous tensor of the type of `like`.
pub(super) fn unwritten(like: &Tensor, place: Where, sizes: &[i64]) -> Result<Tensor, TorchError> {
    let (mut out, like) = (std::ptr::null_mut(), like.as_ptr().cast_mut());
    // SAFETY: `like` and `sizes` are good for the call; what comes back is a new handle, ours.
    unsafe {
        let message = drumline_tensor_room(like, place == Where::Host, sizes.as_ptr(), sizes.len(), &mut out);
        check(message, "cannot make room for a collective")?;
        Ok(Tensor::from_ptr(out))
    }
}
