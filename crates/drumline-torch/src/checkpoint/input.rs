//! The inputs of a checkpoint, which it keeps.

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::saved_tensors::SavedTensor;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_role_of(tensor: *const C_tensor) -> i8;
    fn drumline_with_role(tensor: *const C_tensor, role: i8, out: *mut *mut C_tensor) -> Message;
}

/// What a tensor is for autograd: constant, a parameter, or computed from one. The numbers are those of the shim.
///
/// In the second forward a tensor must have the role of the first, because operations save other tensors if an input
/// needs no gradient, and parameters are not packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Role(i8);

impl Role {
    pub(super) const CONSTANT: Self = Self(0);

    pub(super) fn of(tensor: &Tensor) -> Self {
        // SAFETY: the handle is valid for the call.
        Self(unsafe { drumline_role_of(tensor.as_ptr()) })
    }

    /// A tensor over the same memory with this role, at the beginning of a new graph.
    pub(super) fn give(self, tensor: &Tensor) -> Result<Tensor, TorchError> {
        let mut out = std::ptr::null_mut();
        // SAFETY: the handle is valid for the call; the result is a new handle that we own.
        unsafe {
            check(drumline_with_role(tensor.as_ptr(), self.0, &mut out), "cannot begin a second forward")?;
            Ok(Tensor::from_ptr(out))
        }
    }
}

/// An input, kept until backward.
pub(super) struct Input {
    saved: SavedTensor,
    role: Role,
}

impl Input {
    pub(super) fn new(tensor: &Tensor) -> Result<Self, TorchError> {
        Ok(Self { saved: SavedTensor::new(tensor)?, role: Role::of(tensor) })
    }

    /// The input of the second forward. An error if it has changed since the first.
    pub(super) fn again(&self) -> Result<Tensor, TorchError> {
        self.role.give(&self.saved.get()?)
    }
}
