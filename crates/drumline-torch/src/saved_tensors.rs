//! The tensors that operations save for backward: hooks that keep something else instead, and their size.
//!
//! ```text
//!   forward    an operation saves x ─▶ pack(x) ─▶ a closure, which autograd keeps instead of x
//!   backward   the operation needs x ◀─ what the closure returns
//! ```
//! As PyTorch's `torch.autograd.graph.saved_tensors_hooks`. Parameters and their views are never packed: they live as
//! long as the model. [`checkpoint`](crate::checkpoint()) and [`offload_saved`](crate::offload_saved) are made of this.
#![allow(unsafe_code)]

mod offload;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::checkpoint::NoCheckpoint;
use crate::error::TorchError;
use crate::function::{FunctionError, released};
use crate::status::{Message, check, message, panicked};

pub use offload::offload_saved;

/// Returns the tensor that was packed, with the same elements, shape and type. It is called when backward needs the
/// tensor, on the thread of that backward, and again in a second backward.
pub type Unpack = Box<dyn FnMut() -> Result<Tensor, FunctionError> + Send>;

/// `torch::autograd::SavedVariable`.
#[repr(C)]
struct SavedVariable {
    _opaque: [u8; 0],
}

/// Laid out as `Packed` of the shim.
#[repr(C)]
struct Packed {
    context: *mut c_void,
    unpack: extern "C" fn(*mut c_void, *mut *mut C_tensor) -> Message,
    drop: extern "C" fn(*mut c_void),
}

/// Laid out as `Scope` of the shim.
#[repr(C)]
struct Scope {
    context: *mut c_void,
    pack: extern "C" fn(*mut c_void, *mut C_tensor, *const C_tensor, *mut Packed) -> Message,
}

unsafe extern "C" {
    fn drumline_saved_enter(scope: Scope) -> Message;
    fn drumline_saved_leave();
    fn drumline_saved_new(tensor: *const C_tensor, out: *mut *mut SavedVariable) -> Message;
    fn drumline_saved_get(saved: *const SavedVariable, out: *mut *mut C_tensor) -> Message;
    fn drumline_saved_free(saved: *mut SavedVariable);
    fn drumline_version_of(tensor: *const C_tensor) -> i64;
    fn drumline_storage_of(tensor: *const C_tensor, address: *mut usize, bytes: *mut usize);
}

/// Runs `body`. What its operations save for backward goes through `pack`, which returns what gives it back.
///
/// The tensor that `pack` gets has no history. Scopes nest, and only the innermost one packs. If a closure fails or
/// panics, the operation or the backward ends with an error that has its text.
///
/// ```
/// use drumline_torch::saved_tensor_hooks;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// // Keeps activations in 16 bits.
/// let y = saved_tensor_hooks(
///     |tensor| {
///         let (kept, kind) = (tensor.f_to_kind(Kind::BFloat16)?, tensor.kind());
///         Ok(Box::new(move || Ok(kept.f_to_kind(kind)?)))
///     },
///     || (&x * 3.0).exp(),
/// )?;
/// y.sum(Kind::Float).backward();
/// assert!((x.grad().double_value(&[0]) - 3.0 * 3f64.exp()).abs() < 0.5);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn saved_tensor_hooks<R>(
    pack: impl Fn(&Tensor) -> Result<Unpack, FunctionError>,
    body: impl FnOnce() -> R,
) -> Result<R, TorchError> {
    let pack = |saving: Saving<'_>| pack(&saving.data);
    let _scope = HooksScope::enter(&pack)?;
    Ok(body())
}

/// A tensor that an operation is about to save.
pub(crate) struct Saving<'a> {
    /// Its elements, without history.
    pub(crate) data: Tensor,
    original: *const C_tensor,
    borrowed: PhantomData<&'a C_tensor>,
}

impl Saving<'_> {
    /// The tensor itself, for the shim. Valid as long as this.
    pub(crate) fn original(&self) -> *const C_tensor {
        self.original
    }
}

type Pack<'a> = dyn Fn(Saving<'_>) -> Result<Unpack, FunctionError> + 'a;

/// Hooks of this thread, until this is dropped.
pub(crate) struct HooksScope<'a> {
    /// What C++ points at.
    #[expect(clippy::redundant_allocation, reason = "C++ needs a thin pointer that stays")]
    _pack: Box<&'a Pack<'a>>,
    _no_checkpoint: NoCheckpoint,
    /// The hooks belong to the thread.
    stays: PhantomData<*const ()>,
}

impl<'a> HooksScope<'a> {
    pub(crate) fn enter(pack: &'a Pack<'a>) -> Result<Self, TorchError> {
        let pack = Box::new(pack);
        let context = (&raw const *pack).cast_mut().cast();
        // SAFETY: C++ uses the context until the scope is left, and this owns it.
        let message = unsafe { drumline_saved_enter(Scope { context, pack: call_pack }) };
        check(message, "cannot hook saved tensors")?;
        Ok(Self { _pack: pack, _no_checkpoint: NoCheckpoint::begin(), stays: PhantomData })
    }
}

impl Drop for HooksScope<'_> {
    fn drop(&mut self) {
        // SAFETY: entered on this thread, and scopes are left in the reverse order.
        unsafe { drumline_saved_leave() };
    }
}

extern "C" fn call_pack(
    context: *mut c_void,
    data: *mut C_tensor,
    original: *const C_tensor,
    out: *mut Packed,
) -> Message {
    // SAFETY: the handle is new, and we own it.
    let data = unsafe { Tensor::from_ptr(data) };
    // SAFETY: set by `HooksScope::enter`, whose scope is still entered.
    let pack = unsafe { &*context.cast::<&Pack<'_>>() };
    let packed = catch_unwind(AssertUnwindSafe(|| pack(Saving { data, original, borrowed: PhantomData })));
    match packed.unwrap_or_else(|panic| Err(panicked(&*panic).into())) {
        Ok(unpack) => {
            let context = Box::into_raw(Box::new(Mutex::new(unpack))).cast();
            // SAFETY: room for one value, which C++ owns from here on.
            unsafe { out.write(Packed { context, unpack: call_unpack, drop: drop_unpack }) };
            std::ptr::null_mut()
        }
        Err(error) => message(&format!("a hook on saved tensors failed: {error}")),
    }
}

extern "C" fn call_unpack(context: *mut c_void, out: *mut *mut C_tensor) -> Message {
    // SAFETY: made by `call_pack`, and not dropped yet.
    let unpack = unsafe { &*context.cast::<Mutex<Unpack>>() };
    let mut unpack = unpack.lock().unwrap_or_else(PoisonError::into_inner);
    let unpacked = catch_unwind(AssertUnwindSafe(&mut **unpack));
    match unpacked.unwrap_or_else(|panic| Err(panicked(&*panic).into())) {
        Ok(tensor) => {
            // SAFETY: room for one handle, of which C++ takes ownership.
            unsafe { out.write(released(tensor)) };
            std::ptr::null_mut()
        }
        Err(error) => message(&error.to_string()),
    }
}

extern "C" fn drop_unpack(context: *mut c_void) {
    // SAFETY: made by `call_pack`, and dropped once. Nobody can handle a panic while dropping.
    let unpack = unsafe { Box::from_raw(context.cast::<Mutex<Unpack>>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unpack)));
}

/// A tensor that is kept for backward: hooks of an outer scope apply to it, as to those of operations.
pub(crate) struct SavedTensor(*mut SavedVariable);

// SAFETY: any thread may use libtorch's object, one at a time.
unsafe impl Send for SavedTensor {}

impl SavedTensor {
    pub(crate) fn new(tensor: &Tensor) -> Result<Self, TorchError> {
        let mut saved = std::ptr::null_mut();
        // SAFETY: the handle is valid for the call, which writes one pointer that we own.
        check(unsafe { drumline_saved_new(tensor.as_ptr(), &mut saved) }, "cannot save a tensor")?;
        Ok(Self(saved))
    }

    /// The tensor without history. An error if it has changed since.
    pub(crate) fn get(&self) -> Result<Tensor, TorchError> {
        let mut tensor = std::ptr::null_mut();
        // SAFETY: the object lives; the result is a new handle that we own.
        unsafe {
            check(drumline_saved_get(self.0, &mut tensor), "cannot take a saved tensor")?;
            Ok(Tensor::from_ptr(tensor))
        }
    }
}

impl Drop for SavedTensor {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used again.
        unsafe { drumline_saved_free(self.0) };
    }
}

/// A tensor, and whether it has changed since.
#[derive(Debug)]
pub(crate) struct Unchanged {
    tensor: Tensor,
    version: i64,
}

/// A saved tensor was modified in place.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "a tensor of shape {shape:?} that backward needs was modified in place (version {version}, expected {expected}); \
     try the operation without the underscore at the end of its name"
)]
pub(crate) struct Modified {
    shape: Vec<i64>,
    version: i64,
    expected: i64,
}

impl Unchanged {
    pub(crate) fn new(tensor: Tensor) -> Self {
        Self { version: version(&tensor), tensor }
    }

    pub(crate) fn get(&self) -> Result<&Tensor, Modified> {
        let (version, expected) = (version(&self.tensor), self.version);
        if version == expected {
            return Ok(&self.tensor);
        }
        Err(Modified { shape: self.tensor.size(), version, expected })
    }

    /// The tensor, even if it has changed.
    pub(crate) fn get_unchecked(&self) -> &Tensor {
        &self.tensor
    }

    pub(crate) fn into_tensor(self) -> Result<Tensor, Modified> {
        self.get()?;
        Ok(self.tensor)
    }
}

fn version(tensor: &Tensor) -> i64 {
    // SAFETY: the handle is valid for the call.
    unsafe { drumline_version_of(tensor.as_ptr()) }
}

/// Memory of libtorch: its address and size. A tensor may be a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Storage {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
}

impl Storage {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        let mut storage = Self { address: 0, bytes: 0 };
        // SAFETY: the handle is valid for the call, which fills two numbers.
        unsafe { drumline_storage_of(tensor.as_ptr(), &mut storage.address, &mut storage.bytes) };
        storage
    }
}

/// What lies in memory between forward and backward, beside parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SavedSize {
    /// The number of tensors that were saved. Operations that save the same one count it again.
    pub tensors: usize,
    /// The bytes of their memory, each counted once.
    pub bytes: usize,
}

/// Runs `body`, and measures what its operations save for backward. Checkpoints and other hooks inside of it count with
/// what they keep.
///
/// ```
/// use drumline_torch::saved_size;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([100], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let (y, size) = saved_size(|| (&x * 3.0).exp())?;
/// assert_eq!((size.tensors, size.bytes), (1, 400));
/// # drop(y);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn saved_size<R>(body: impl FnOnce() -> R) -> Result<(R, SavedSize), TorchError> {
    let (tensors, memory) = (Cell::new(0), RefCell::new(HashMap::new()));
    let pack = |tensor: &Tensor| -> Result<Unpack, FunctionError> {
        let storage = Storage::of(tensor);
        tensors.set(tensors.get() + 1);
        memory.borrow_mut().insert(storage.address, storage.bytes);
        let kept = Unchanged::new(tensor.shallow_clone());
        Ok(Box::new(move || Ok(kept.get()?.shallow_clone())))
    };
    let result = saved_tensor_hooks(pack, body)?;
    let bytes = memory.borrow().values().sum();
    Ok((result, SavedSize { tensors: tensors.get(), bytes }))
}

#[cfg(test)]
mod tests;
