//! Tensors whose memory comes and goes, and a listener that learns which of them an operation is about to use.
//!
//! ```text
//!   Movable ── views of it are parameters ──▶ model ──▶ an operation ──▶ UsageWatch: the listener points the Movable at
//!      ▲                                                                 memory that holds the elements ──▶ the operation
//!      └──────────────────────────── point_at ◀──────────────────────────┘                                  reads them
//! ```
//! At rest a [`Movable`] has an address of its own, at which there is no memory. So different tensors still have different
//! addresses, and a use that nobody noticed does not read the memory of another tensor.
//!
//! libtorch reports its own operations; kernels of this crate that take an address call [`report`].
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::status::{Message, check};

/// `std::shared_ptr<Watch>`.
#[repr(C)]
struct Watch {
    _opaque: [u8; 0],
}

/// Laid out as `Listener` of the shim.
#[repr(C)]
struct Listener {
    context: *mut c_void,
    used: extern "C" fn(*mut c_void, *const usize, usize, *const c_char),
    drop: extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    fn drumline_movable_new(
        like: *const C_tensor,
        len: i64,
        address: *mut c_void,
        out: *mut *mut C_tensor,
    ) -> Message;
    fn drumline_movable_point(movable: *const C_tensor, address: *mut c_void) -> Message;
    fn drumline_usage_watch(tensors: List, listener: Listener, out: *mut *mut Watch) -> Message;
    fn drumline_usage_unwatch(watch: *mut Watch);
    fn drumline_usage_unreported(watch: *const Watch, number: usize);
    fn drumline_usage_report(tensor: *const C_tensor, operation: *const c_char);
}

/// Addresses without memory. They stay reserved until the process ends: a tensor over them may outlive all else.
#[derive(Debug)]
struct Reserved {
    start: usize,
}

impl Reserved {
    fn new(bytes: usize) -> Result<Self, TorchError> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping that nothing may read or write.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes.max(1), ProtFlags::empty(), flags) };
        let start = start.map_err(|error| TorchError::Library {
            operation: "cannot reserve addresses for parameters",
            message: error.to_string(),
        })?;
        Ok(Self { start: start as usize })
    }
}

/// A one-dimensional tensor whose memory can be exchanged under all its views.
#[derive(Debug)]
pub struct Movable {
    tensor: Tensor,
    at_rest: Reserved,
}

// SAFETY: threads may share a handle of libtorch, because its reference count is atomic. Who moves it and who uses it is
// up to the users, as with any two handles of one tensor.
unsafe impl Sync for Movable {}

impl Movable {
    /// A tensor without memory.
    pub fn new(kind: Kind, len: usize, device: Device) -> Result<Self, TorchError> {
        let at_rest = Reserved::new(len * kind.elt_size_in_bytes())?;
        let like = Tensor::f_empty([0], (kind, device))?;
        let mut out = std::ptr::null_mut();
        // SAFETY: the handle is valid for the call; the result is a new handle that we own. Nothing reads the address.
        let tensor = unsafe {
            let address = at_rest.start as *mut c_void;
            let message = drumline_movable_new(like.as_ptr(), len as i64, address, &mut out);
            check(message, "cannot make a tensor without memory")?;
            Tensor::from_ptr(out)
        };
        Ok(Self { tensor, at_rest })
    }

    /// The tensor.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// From now on its elements are those at the beginning of `memory`, which is as large and outlives this use.
    /// Nothing is copied.
    pub fn point_at(&self, memory: &Tensor) -> Result<(), TorchError> {
        let size = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        if size(memory) < size(&self.tensor) {
            let needed = format!("at least {}", size(&self.tensor));
            return Err(TorchError::value("the memory of a tensor in bytes", size(memory), needed));
        }
        self.point(memory.data_ptr())
    }

    /// The addresses of its elements when it has no memory.
    pub fn addresses(&self) -> Range<usize> {
        let len = self.tensor.numel() * self.tensor.kind().elt_size_in_bytes();
        self.at_rest.start..self.at_rest.start + len.max(1)
    }

    /// It has no memory from now on.
    pub fn rest(&self) -> Result<(), TorchError> {
        self.point(self.at_rest.start as *mut c_void)
    }

    fn point(&self, address: *mut c_void) -> Result<(), TorchError> {
        // SAFETY: the handle is valid for the call, which stores the address.
        check(unsafe { drumline_movable_point(self.tensor.as_ptr(), address) }, "cannot move a tensor")
    }
}

/// Reports uses of some tensors and their views until it is dropped.
#[derive(Debug)]
pub struct UsageWatch(*mut Watch);

// SAFETY: C++ guards it by a lock, and the listener is `Send` and `Sync`.
unsafe impl Send for UsageWatch {}
// SAFETY: as above.
unsafe impl Sync for UsageWatch {}

/// What is called: the numbers of the tensors that an operation uses, and its name.
type Used = Box<dyn Fn(&[usize], &str) + Send + Sync>;

impl UsageWatch {
    /// Calls `used` before each operation that uses some of these tensors, on the thread of the operation. What it does
    /// itself is not reported. It cannot fail: it notes errors for later, and lets the operation run.
    pub fn new(
        tensors: &[&Tensor],
        used: impl Fn(&[usize], &str) + Send + Sync + 'static,
    ) -> Result<Self, TorchError> {
        let used: Used = Box::new(used);
        let listener =
            Listener { context: Box::into_raw(Box::new(used)).cast(), used: call, drop: drop_used };
        let (handles, mut watch) = (Handles::of(tensors), std::ptr::null_mut());
        // SAFETY: the handles are valid for the call. C++ owns the listener from here on.
        let message = unsafe { drumline_usage_watch(handles.list(), listener, &mut watch) };
        check(message, "cannot watch the use of tensors")?;
        Ok(Self(watch))
    }

    /// Operations that use only this tensor are not reported until the next call, as it has its memory.
    pub fn leave_out(&self, tensor: Option<usize>) {
        // SAFETY: the watch lives.
        unsafe { drumline_usage_unreported(self.0, tensor.unwrap_or(usize::MAX)) };
    }
}

impl Drop for UsageWatch {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and not used again.
        unsafe { drumline_usage_unwatch(self.0) };
    }
}

extern "C" fn call(context: *mut c_void, tensors: *const usize, len: usize, operation: *const c_char) {
    // SAFETY: made by `new`; C++ passes an array and a zero-terminated string that live during the call.
    let (used, tensors, operation) = unsafe {
        let operation = CStr::from_ptr(operation).to_string_lossy();
        (&*context.cast::<Used>(), std::slice::from_raw_parts(tensors, len), operation)
    };
    // A panic must not reach C++. Its message is printed by the panic hook.
    let _ = catch_unwind(AssertUnwindSafe(|| used(tensors, &operation)));
}

extern "C" fn drop_used(context: *mut c_void) {
    // SAFETY: made by `new`, and dropped once.
    let used = unsafe { Box::from_raw(context.cast::<Used>()) };
    let _ = catch_unwind(AssertUnwindSafe(|| drop(used)));
}

/// The name of an operation outside of libtorch, which uses tensors one after the other.
pub const KERNEL: &str = "a kernel of drumline";

/// Reports that a kernel is about to take the address of a tensor.
pub(crate) fn report(tensor: &Tensor) {
    const NAME: &CStr = c"a kernel of drumline";
    // SAFETY: the handle and the string are valid for the call.
    unsafe { drumline_usage_report(tensor.as_ptr(), NAME.as_ptr()) };
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::memory::tensor_within;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// Two weights in memory that a listener gives them when they are used.
    fn gradients(is_moved: bool) -> (Vec<Tensor>, Vec<String>) {
        tch::manual_seed(3);
        let values = [Tensor::randn([4, 3], CPU), Tensor::randn([2, 4], CPU)];
        let movables: Arc<Vec<Movable>> = Arc::new(
            values.iter().map(|w| Movable::new(Kind::Float, w.numel(), Device::Cpu).unwrap()).collect(),
        );
        let weights: Vec<Tensor> = values
            .iter()
            .zip(movables.iter())
            .map(|(value, movable)| {
                let memory = if is_moved { movable.tensor() } else { &value.view([-1]).copy() };
                tensor_within(memory, 0, value).unwrap().set_requires_grad(true)
            })
            .collect();
        let uses = Arc::new(Mutex::new(Vec::new()));
        let (noted, held) = (uses.clone(), movables.clone());
        let memory = Mutex::new((Tensor::zeros([12], CPU), values.map(|value| value.view([-1]))));
        let gather = move |used: &[usize], operation: &str| {
            let _no_grad = tch::no_grad_guard();
            let (slot, values) = &*memory.lock().unwrap();
            let unit = used[0];
            noted.lock().unwrap().push(format!("{unit} {operation}"));
            held.iter().for_each(|movable| movable.rest().unwrap());
            slot.narrow(0, 0, values[unit].size1().unwrap()).copy_(&values[unit]);
            held[unit].point_at(slot).unwrap();
        };
        let watched: Vec<&Tensor> = movables.iter().map(Movable::tensor).collect();
        let watch = UsageWatch::new(&watched, gather).unwrap();
        let x = Tensor::randn([5, 3], CPU).set_requires_grad(true);
        let y = x.matmul(&weights[0].tr()).tanh().matmul(&weights[1].tr());
        y.square().sum(Kind::Float).backward();
        drop(watch);
        let uses = uses.lock().unwrap().clone();
        (vec![x.grad(), weights[0].grad(), weights[1].grad()], uses)
    }

    #[test]
    fn memory_that_comes_when_it_is_used_gives_the_same_gradients() {
        let (moved, uses) = gradients(true);
        let (expected, unmoved) = gradients(false);
        assert!(unmoved.is_empty(), "{unmoved:?}");
        assert!(moved.iter().zip(&expected).all(|(a, b)| a.equal(b)));
        let units: Vec<&str> = uses.iter().map(|used| &used[..1]).collect();
        assert_eq!(units.first(), Some(&"0"), "{uses:?}");
        let turns = units.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(turns, 2, "first 0, then 1, and 0 again in backward: {uses:?}");
    }

    #[test]
    fn a_tensor_at_rest_has_an_address_of_its_own() {
        let [a, b] = [0; 2].map(|_| Movable::new(Kind::Float, 4, Device::Cpu).unwrap());
        assert_ne!(a.tensor().data_ptr(), b.tensor().data_ptr());
        let before = a.tensor().data_ptr();
        let memory = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0]);
        a.point_at(&memory).unwrap();
        assert_eq!(Vec::<f32>::try_from(a.tensor()).unwrap(), [1.0, 2.0, 3.0, 4.0]);
        a.rest().unwrap();
        assert_eq!(a.tensor().data_ptr(), before);
        assert!(a.point_at(&memory.narrow(0, 0, 3).copy()).is_err());
    }
}
