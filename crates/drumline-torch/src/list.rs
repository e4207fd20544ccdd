//! A list of tensors as C++ takes it. The layout is that of `drumline::List` in `shim/list.h`.

use std::marker::PhantomData;

use tch::Tensor;
use torch_sys::C_tensor;

/// Handles of tensors that are owned elsewhere.
pub(crate) struct Handles<'a> {
    pointers: Vec<*mut C_tensor>,
    tensors: PhantomData<&'a Tensor>,
}

/// What C++ sees. Valid as long as the [`Handles`] that it came from.
#[repr(C)]
pub(crate) struct List {
    items: *const *mut C_tensor,
    len: usize,
}

impl<'a> Handles<'a> {
    pub(crate) fn of(tensors: &[&'a Tensor]) -> Self {
        let pointers = tensors.iter().map(|tensor| tensor.as_ptr().cast_mut()).collect();
        Self { pointers, tensors: PhantomData }
    }

    /// The same, with a null pointer for `None`.
    pub(crate) fn of_each(tensors: impl Iterator<Item = Option<&'a Tensor>>) -> Self {
        let handle = |tensor: Option<&Tensor>| {
            tensor.map_or(std::ptr::null_mut(), |tensor| tensor.as_ptr().cast_mut())
        };
        Self { pointers: tensors.map(handle).collect(), tensors: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.pointers.len()
    }

    pub(crate) fn list(&self) -> List {
        List { items: self.pointers.as_ptr(), len: self.pointers.len() }
    }
}
