//! The state of the random number generators: capture, restore, seed.
//!
//! These are libtorch's default generators: one for the CPU and one for each GPU, shared by the whole process. The
//! bytes are those of PyTorch's `torch.get_rng_state()` and `torch.cuda.get_rng_state()`.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::bytes::bytes;
use crate::error::TorchError;
use crate::memory::tensor_from_vec;
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_rng_num_gpus(num: *mut i64) -> Message;
    fn drumline_rng_get(device: i64, state: *mut *mut C_tensor) -> Message;
    fn drumline_rng_set(device: i64, state: *mut C_tensor) -> Message;
    fn drumline_rng_seeded(device: i64, seed: u64, state: *mut *mut C_tensor) -> Message;
}

/// The shim's number for the CPU.
const CPU: i64 = -1;

/// The state of all generators of the process.
///
/// ```
/// use drumline_torch::RngState;
/// use tch::{Kind, Tensor};
///
/// let place = (Kind::Float, tch::Device::Cpu);
/// let before = RngState::capture()?;
/// let first = Tensor::rand([100], place);
/// before.restore()?;
/// assert_eq!(first, Tensor::rand([100], place));
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RngState {
    /// The CPU's generator.
    pub cpu: Vec<u8>,
    /// The generators of the GPUs that this process sees, in their order.
    pub cuda: Vec<Vec<u8>>,
}

impl RngState {
    /// Captures the current state.
    pub fn capture() -> Result<Self, TorchError> {
        Self::of_each(state_of)
    }

    /// Captures the state of the CPU's generator only.
    pub(crate) fn of_host() -> Result<Self, TorchError> {
        Ok(Self { cpu: state_of(CPU)?, cuda: Vec::new() })
    }

    /// The state after `manual_seed(seed)`. The generators of the process do not change.
    pub fn seeded(seed: u64) -> Result<Self, TorchError> {
        Self::of_each(|device| seeded_state(device, seed))
    }

    /// Makes it the state of the process. GPUs for which it has no state keep theirs, and states of missing GPUs are
    /// ignored.
    pub fn restore(&self) -> Result<(), TorchError> {
        set_state(CPU, &self.cpu)?;
        let here = (0..num_gpus()?).zip(&self.cuda);
        here.into_iter().try_for_each(|(device, state)| set_state(device, state))
    }

    fn of_each(state: impl Fn(i64) -> Result<Vec<u8>, TorchError>) -> Result<Self, TorchError> {
        let cuda = (0..num_gpus()?).map(&state).collect::<Result<_, _>>()?;
        Ok(Self { cpu: state(CPU)?, cuda })
    }
}

fn num_gpus() -> Result<i64, TorchError> {
    let mut num = 0;
    // SAFETY: writes one number.
    check(unsafe { drumline_rng_num_gpus(&mut num) }, "cannot count GPUs")?;
    Ok(num)
}

fn state_of(device: i64) -> Result<Vec<u8>, TorchError> {
    let mut state = std::ptr::null_mut();
    // SAFETY: the result is a new handle that we own.
    let state = unsafe {
        check(drumline_rng_get(device, &mut state), "cannot read a random number generator")?;
        Tensor::from_ptr(state)
    };
    Ok(bytes(&state)?.to_vec())
}

fn seeded_state(device: i64, seed: u64) -> Result<Vec<u8>, TorchError> {
    let mut state = std::ptr::null_mut();
    // SAFETY: as in `state_of`.
    let state = unsafe {
        check(drumline_rng_seeded(device, seed, &mut state), "cannot seed a random number generator")?;
        Tensor::from_ptr(state)
    };
    Ok(bytes(&state)?.to_vec())
}

fn set_state(device: i64, state: &[u8]) -> Result<(), TorchError> {
    let state = tensor_from_vec(state.to_vec(), &[state.len() as i64])?;
    // SAFETY: the handle is valid for the call, which copies; libtorch checks length and contents.
    let message = unsafe { drumline_rng_set(device, state.as_ptr().cast_mut()) };
    check(message, "cannot set a random number generator")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    /// Random numbers of several kinds. Normal ones are drawn in pairs, and the generator keeps the second.
    fn draw() -> Vec<Tensor> {
        let place = (Kind::Float, Device::Cpu);
        vec![
            Tensor::randn([3], place),
            Tensor::rand([17], place),
            Tensor::randperm(11, (Kind::Int64, Device::Cpu)),
            Tensor::randn([5], (Kind::Double, Device::Cpu)),
        ]
    }

    // One test, because the whole process shares the generator.
    #[test]
    fn a_restored_state_draws_the_same_numbers() {
        let _ = draw();
        let state = RngState::capture().unwrap();
        let first = draw();
        assert_ne!(RngState::capture().unwrap(), state);
        let other = draw();
        state.restore().unwrap();
        let again = draw();
        assert_eq!(again, first);
        assert_ne!(other, first);

        let seeded = RngState::seeded(7).unwrap();
        let untouched = draw();
        state.restore().unwrap();
        let _ = draw();
        assert_eq!(draw(), untouched, "`seeded` leaves the process's generator alone");
        tch::manual_seed(7);
        assert_eq!(RngState::capture().unwrap(), seeded);

        let short = RngState { cpu: vec![1, 2, 3], cuda: Vec::new() };
        let error = short.restore().unwrap_err().to_string();
        assert!(error.starts_with("cannot set a random number generator: "), "{error}");
        assert_eq!(RngState::capture().unwrap(), seeded);
    }
}
