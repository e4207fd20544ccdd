//! Mixed precision: within a scope, operations that gain from it (matrix products, convolutions) run in a shorter type.
//!
//! Weights stay as they are: they are cast where they are used, once per scope, and their gradients come back in their own type. Only the
//! forward belongs in the scope; backward follows the types that forward used. It holds for the current thread.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::error::TorchError;
use crate::status::{Message, check};

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct State {
    enabled: bool,
    dtype: i8,
}

unsafe extern "C" {
    fn drumline_autocast_enter(device: i8, state: State, before: *mut State) -> Message;
    fn drumline_autocast_leave(device: i8, before: State) -> Message;
    fn drumline_autocast_state(device: i8, state: *mut State) -> Message;
}

/// Runs `body` with autocast to `dtype` on devices of this kind; scopes nest, and end also when `body` panics.
///
/// ```
/// use drumline_torch::{autocast, no_autocast};
/// use tch::{Device, Kind, Tensor};
///
/// let a = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let (inside, within) = autocast(Device::Cpu, Kind::BFloat16, || {
///     (a.matmul(&a), no_autocast(Device::Cpu, || a.matmul(&a)))
/// })?;
/// assert_eq!((inside.kind(), within?.kind()), (Kind::BFloat16, Kind::Float));
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn autocast<R>(device: Device, dtype: Kind, body: impl FnOnce() -> R) -> Result<R, TorchError> {
    let _scope = Autocast::new(device, dtype)?;
    Ok(body())
}

/// Runs `body` with autocast off on devices of this kind, also within a scope where it is on.
pub fn no_autocast<R>(device: Device, body: impl FnOnce() -> R) -> Result<R, TorchError> {
    let _scope = Autocast::enter(device, State { enabled: false, dtype: -1 })?;
    Ok(body())
}

/// The type that autocast makes of products on devices of this kind, where it is on.
pub(crate) fn autocast_kind(device: Device) -> Result<Option<Kind>, TorchError> {
    let mut state = State { enabled: false, dtype: -1 };
    // SAFETY: fills one value.
    check(unsafe { drumline_autocast_state(number(device)?, &mut state) }, "cannot look at autocast")?;
    let kinds = [Kind::BFloat16, Kind::Half];
    Ok(kinds.into_iter().find(|kind| state.enabled && state.dtype == *kind as i8))
}

/// Autocast until this is dropped, on the thread that made it.
#[derive(Debug)]
#[must_use = "autocast ends when this is dropped"]
pub struct Autocast {
    device: i8,
    before: State,
    /// The setting is the thread's.
    stays: PhantomData<*const ()>,
}

impl Autocast {
    /// Autocast to `dtype`, which is `Kind::BFloat16` or `Kind::Half`.
    pub fn new(device: Device, dtype: Kind) -> Result<Self, TorchError> {
        if !matches!(dtype, Kind::BFloat16 | Kind::Half) {
            return Err(TorchError::Unfit(format!(
                "autocast to {dtype:?} makes nothing shorter; try Kind::BFloat16 or Kind::Half"
            )));
        }
        Self::enter(device, State { enabled: true, dtype: dtype as i8 })
    }

    fn enter(device: Device, state: State) -> Result<Self, TorchError> {
        let device = number(device)?;
        let mut before = state;
        // SAFETY: takes plain values and fills one.
        let message = unsafe { drumline_autocast_enter(device, state, &mut before) };
        check(message, "cannot turn autocast on")?;
        Ok(Self { device, before, stays: PhantomData })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        // SAFETY: takes plain values, which come from libtorch.
        let message = unsafe { drumline_autocast_leave(self.device, self.before) };
        // What was taken from libtorch is taken back by it.
        let _ = check(message, "cannot turn autocast off");
    }
}

/// As `c10::DeviceType` has it.
fn number(device: Device) -> Result<i8, TorchError> {
    match device {
        Device::Cpu => Ok(0),
        Device::Cuda(_) => Ok(1),
        Device::Mps => Ok(13),
        other => Err(TorchError::Unfit(format!("there is no autocast for {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    fn ones() -> Tensor {
        Tensor::ones([2, 2], (Kind::Float, Device::Cpu))
    }

    fn product() -> Kind {
        ones().matmul(&ones()).kind()
    }

    #[test]
    fn scopes_nest_and_end() {
        assert_eq!(product(), Kind::Float);
        let outer = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        assert_eq!(product(), Kind::BFloat16);
        assert_eq!(autocast(Device::Cpu, Kind::Half, product).unwrap(), Kind::Half);
        assert_eq!(product(), Kind::BFloat16);
        let off_and_on =
            no_autocast(Device::Cpu, || (product(), autocast(Device::Cpu, Kind::BFloat16, product)));
        let (off, on) = off_and_on.unwrap();
        assert_eq!((off, on.unwrap()), (Kind::Float, Kind::BFloat16));
        drop(outer);
        assert_eq!(product(), Kind::Float);
    }

    #[test]
    fn a_panic_ends_the_scope() {
        let panicked = std::panic::catch_unwind(|| {
            autocast(Device::Cpu, Kind::BFloat16, || {
                assert_eq!(product(), Kind::BFloat16);
                panic!("on purpose")
            })
        });
        assert!(panicked.is_err());
        assert_eq!(product(), Kind::Float);
    }

    #[test]
    fn other_threads_and_devices_are_left_alone() {
        let _scope = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        assert_eq!(std::thread::spawn(product).join().unwrap(), Kind::Float);
        drop(_scope);
        let _scope = Autocast::new(Device::Cuda(0), Kind::Half).unwrap();
        assert_eq!(product(), Kind::Float);
    }

    #[test]
    fn gradients_of_weights_keep_their_type() {
        let weight = ones().set_requires_grad(true);
        let output =
            autocast(Device::Cpu, Kind::BFloat16, || ones().matmul(&weight).matmul(&weight)).unwrap();
        assert_eq!(output.kind(), Kind::BFloat16);
        output.sum(Kind::Float).backward();
        assert_eq!(weight.grad().kind(), Kind::Float);
        assert_eq!(weight.grad(), ones() * 8);
    }

    #[test]
    fn types_that_are_not_shorter_are_refused() {
        for kind in [Kind::Float, Kind::Int64, Kind::Double] {
            assert!(Autocast::new(Device::Cpu, kind).unwrap_err().to_string().contains("BFloat16"));
        }
        assert!(Autocast::new(Device::Vulkan, Kind::Half).is_err());
    }
}
