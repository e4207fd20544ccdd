//! From where a saved tensor comes, so that it can be made again without computing.

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::saved_tensors::{Saving, Storage};
use crate::status::{Message, check};

/// Laid out as `Origin` of the shim.
#[repr(C)]
struct RawOrigin {
    input: i64,
    is_cast: bool,
    parameter: *mut C_tensor,
}

unsafe extern "C" {
    fn drumline_origin_of(saved: *const C_tensor, inputs: List, origin: *mut RawOrigin) -> Message;
}

/// A view of a tensor. The offset counts from the first element of that tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    size: Vec<i64>,
    stride: Vec<i64>,
    offset: i64,
}

impl View {
    /// How `view` lies in memory in which another tensor begins at element `whole`.
    fn of(view: &Tensor, whole: i64) -> Self {
        Self { size: view.size(), stride: view.stride(), offset: offset(view) - whole }
    }

    /// The same part of another tensor.
    pub(super) fn take(&self, whole: &Tensor) -> Result<Tensor, TorchError> {
        Ok(whole.f_as_strided(&self.size[..], &self.stride[..], offset(whole) + self.offset)?)
    }
}

/// The index of the first element in the tensor's memory.
fn offset(tensor: &Tensor) -> i64 {
    if tensor.numel() == 0 {
        return 0;
    }
    let bytes = tensor.data_ptr() as usize - Storage::of(tensor).address;
    (bytes / tensor.kind().elt_size_in_bytes()) as i64
}

/// Where a saved tensor comes from.
#[derive(Debug)]
pub(super) enum Origin {
    /// An input: itself, or cast to another type.
    Input { index: usize, cast: Option<Kind>, view: View },
    /// A parameter that was cast to another type.
    Parameter { parameter: Tensor, kind: Kind, view: View },
    /// The result.
    Result { view: View },
    /// Unknown.
    Unknown,
}

impl Origin {
    /// That of a tensor which an operation on these inputs saves.
    pub(super) fn of(saving: &Saving<'_>, inputs: &[Tensor]) -> Result<Self, TorchError> {
        let borrowed: Vec<&Tensor> = inputs.iter().collect();
        let mut raw = RawOrigin { input: -1, is_cast: false, parameter: std::ptr::null_mut() };
        // SAFETY: the handles are valid for the call, which fills one value.
        let message =
            unsafe { drumline_origin_of(saving.original(), Handles::of(&borrowed).list(), &mut raw) };
        check(message, "cannot inspect a saved tensor")?;
        // SAFETY: a new handle that we own, or null.
        let parameter = (!raw.parameter.is_null()).then(|| unsafe { Tensor::from_ptr(raw.parameter) });
        let saved = &saving.data;
        // Not all types have a name. Casts have.
        let Ok(kind) = saved.f_kind() else { return Ok(Self::Unknown) };
        Ok(match (usize::try_from(raw.input), parameter) {
            (Ok(index), _) if raw.is_cast => {
                Self::Input { index, cast: Some(kind), view: View::of(saved, 0) }
            }
            (Ok(index), _) => {
                Self::Input { index, cast: None, view: View::of(saved, offset(&inputs[index])) }
            }
            (Err(_), Some(parameter)) => Self::Parameter { parameter, kind, view: View::of(saved, 0) },
            (Err(_), None) => Self::Unknown,
        })
    }

    /// The origin of a saved tensor that is a part of the operation's result.
    pub(super) fn in_result(saved: &Tensor, result: &Tensor) -> Self {
        let (one, other) = (Storage::of(saved), Storage::of(result));
        if one.address == 0 || one != other || saved.f_kind().ok() != result.f_kind().ok() {
            return Self::Unknown;
        }
        Self::Result { view: View::of(saved, offset(result)) }
    }
}
