//! A hook that runs when a leaf's gradient has been accumulated.
//!
//! It fires once per leaf and backward, however often the leaf was used. For a leaf that was not used it does not fire.
//! On a CPU it runs on the thread that called `backward`. For gradients on a GPU it runs on a thread of libtorch, hence
//! `Send`.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::function::FunctionError;
use crate::status::{Closure, Message, check};

unsafe extern "C" {
    fn drumline_hook_set(leaf: *mut C_tensor, closure: Closure, number: *mut u64) -> Message;
    fn drumline_hook_is_set(leaf: *const C_tensor, is_set: *mut bool) -> Message;
    fn drumline_hook_clear(leaf: *mut C_tensor, number: u64) -> Message;
}

/// A hook on a leaf. It is removed when this is dropped, or when the leaf gets another hook.
///
/// ```
/// use drumline_torch::GradHook;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use std::sync::Arc;
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::ones([2], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
/// let fired = Arc::new(AtomicUsize::new(0));
/// let counter = fired.clone();
/// let hook = GradHook::new(&weight, move || {
///     counter.fetch_add(1, Ordering::Relaxed);
///     Ok(())
/// })?;
/// (&weight * &weight).sum(Kind::Float).backward();
/// assert_eq!(fired.load(Ordering::Relaxed), 1);
/// assert!(GradHook::is_on(&weight)?);
/// drop(hook);
/// assert!(!GradHook::is_on(&weight)?);
/// (&weight * 2).sum(Kind::Float).backward();
/// assert_eq!(fired.load(Ordering::Relaxed), 1);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Debug)]
pub struct GradHook {
    leaf: Tensor,
    /// Identifies this hook among all hooks of the process.
    number: u64,
}

impl GradHook {
    /// Calls `hook` after each accumulation into `leaf`'s gradient. If it fails or panics, the backward ends with an
    /// error that has its text. A leaf has one hook: this one replaces the one before.
    pub fn new(
        leaf: &Tensor,
        hook: impl FnMut() -> Result<(), FunctionError> + Send + 'static,
    ) -> Result<Self, TorchError> {
        let mut number = 0;
        // SAFETY: the leaf is valid for the call, which writes one number. C++ owns the closure from here on, also
        // after an error.
        let message = unsafe { drumline_hook_set(leaf.as_ptr().cast_mut(), Closure::new(hook), &mut number) };
        check(message, "cannot hook a gradient")?;
        Ok(Self { leaf: leaf.shallow_clone(), number })
    }

    /// Whether a leaf has a hook, which another one would replace.
    pub fn is_on(leaf: &Tensor) -> Result<bool, TorchError> {
        let mut is_set = false;
        // SAFETY: the leaf is valid for the call, which writes one bool.
        check(unsafe { drumline_hook_is_set(leaf.as_ptr(), &mut is_set) }, "cannot look for a hook")?;
        Ok(is_set)
    }
}

impl Drop for GradHook {
    fn drop(&mut self) {
        // SAFETY: the leaf is alive, as this holds it.
        let message = unsafe { drumline_hook_clear(self.leaf.as_mut_ptr(), self.number) };
        // Removing a hook that was set does not fail.
        let _ = check(message, "cannot remove a hook");
    }
}
