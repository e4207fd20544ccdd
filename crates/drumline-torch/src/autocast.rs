//! Autocast: within a scope, operations that gain from it (matrix products, convolutions) run in 16 bits.
//!
//! Weights keep their type. libtorch casts them where they are used, once per scope, and their gradients have their own
//! type. Only the forward belongs in the scope; backward uses the types of the forward. A scope is for the current
//! thread.
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

/// Runs `body` with autocast to `dtype` on devices of this type. Scopes nest, and end even if `body` panics.
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

/// Runs `body` with autocast off on devices of this type, even within a scope where it is on.
pub fn no_autocast<R>(device: Device, body: impl FnOnce() -> R) -> Result<R, TorchError> {
    let _scope = Autocast::enter(device, State { enabled: false, dtype: -1 })?;
    Ok(body())
}

/// The dtype of autocast on devices of this type, if it is on.
pub(crate) fn autocast_kind(device: Device) -> Result<Option<Kind>, TorchError> {
    let state = state_of(device)?;
    let kinds = [Kind::BFloat16, Kind::Half];
    Ok(kinds.into_iter().find(|kind| state.enabled && state.dtype == *kind as i8))
}

/// The settings of the current thread, for CPUs and GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AutocastSettings([State; 2]);

impl AutocastSettings {
    const DEVICES: [Device; 2] = [Device::Cpu, Device::Cuda(0)];

    /// Those of now.
    pub(crate) fn now() -> Result<Self, TorchError> {
        let [cpu, gpu] = Self::DEVICES.map(state_of);
        Ok(Self([cpu?, gpu?]))
    }

    /// Makes them those of this thread, until the scopes are dropped.
    pub(crate) fn enter(self) -> Result<[Autocast; 2], TorchError> {
        let [cpu, gpu] = Self::DEVICES;
        Ok([Autocast::enter(cpu, self.0[0])?, Autocast::enter(gpu, self.0[1])?])
    }
}

fn state_of(device: Device) -> Result<State, TorchError> {
    let mut state = State { enabled: false, dtype: -1 };
    // SAFETY: fills one value.
    check(unsafe { drumline_autocast_state(device_type(device)?, &mut state) }, "cannot look at autocast")?;
    Ok(state)
}

/// Autocast until this is dropped, on the thread that made it.
#[derive(Debug)]
#[must_use = "autocast ends when this is dropped"]
pub struct Autocast {
    device: i8,
    before: State,
    /// The setting belongs to the thread.
    stays: PhantomData<*const ()>,
}

impl Autocast {
    /// Autocast to `dtype`, which is `Kind::BFloat16` or `Kind::Half`.
    pub fn new(device: Device, dtype: Kind) -> Result<Self, TorchError> {
        if !matches!(dtype, Kind::BFloat16 | Kind::Half) {
            return Err(TorchError::value(
                "the dtype of autocast",
                format!("{dtype:?}"),
                "Kind::BFloat16 or Kind::Half",
            ));
        }
        Self::enter(device, State { enabled: true, dtype: dtype as i8 })
    }

    fn enter(device: Device, state: State) -> Result<Self, TorchError> {
        let device = device_type(device)?;
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
        // Restoring what libtorch returned does not fail.
        let _ = check(message, "cannot turn autocast off");
    }
}

/// The number of the device type in `c10::DeviceType`.
fn device_type(device: Device) -> Result<i8, TorchError> {
    match device {
        Device::Cpu => Ok(0),
        Device::Cuda(_) => Ok(1),
        Device::Mps => Ok(13),
        got => {
            let (what, expected) = ("autocast".to_owned(), "Cpu, Cuda or Mps".to_owned());
            Err(TorchError::Device { what, expected, got })
        }
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

    /// libtorch passes products and convolutions of these sizes to oneDNN. If the CPU only claims to have AMX, SIGILL
    /// would kill the process, unless the check before `main` (`shim/amx.cpp`) has noticed.
    #[test]
    fn products_in_16_bits_run_on_every_cpu() {
        let floats = (Kind::Float, Device::Cpu);
        let rows = Tensor::ones([64, 128], floats);
        let product = autocast(Device::Cpu, Kind::BFloat16, || rows.matmul(&rows.tr())).unwrap();
        assert_eq!(product.to_kind(Kind::Float).double_value(&[3, 5]), 128.0);
        let image = Tensor::ones([2, 8, 16, 16], floats);
        let weight = Tensor::ones([16, 8, 3, 3], floats);
        let convolve = || image.conv2d(&weight, None::<Tensor>, 1, 1, 1, 1);
        let convolved = autocast(Device::Cpu, Kind::BFloat16, convolve).unwrap();
        assert_eq!(convolved.to_kind(Kind::Float).double_value(&[0, 0, 8, 8]), 72.0);
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
    fn autocast_to_other_types_is_an_error() {
        for kind in [Kind::Float, Kind::Int64, Kind::Double] {
            assert!(Autocast::new(Device::Cpu, kind).unwrap_err().to_string().contains("BFloat16"));
        }
        assert!(Autocast::new(Device::Vulkan, Kind::Half).is_err());
    }
}
