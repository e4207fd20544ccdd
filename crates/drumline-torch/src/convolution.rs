//! Convolutions whose weight gradients are computed on a second stream, in parallel with the rest of backward.
//!
//! ```text
//!   backward   ◀── input's gradient ◀── norm ◀── input's gradient ◀── …        the next layer waits for it
//!   beside            weight's gradient ───┐        weight's gradient ───┐      only the optimizer waits for it
//! ```
//! Small convolutions leave a GPU partly idle, so that it can compute both at the same time.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use crate::autocast::autocast_kind;
use crate::cuda::{Priority, Stream};
use crate::error::TorchError;
use crate::function::autograd_function;
use crate::grad::{grad, set_grad};
use crate::memory_format::with_layout_of;
use crate::status::{Message, check};
use crate::weight_grads::WeightGrads;

/// Convolutions with more output elements fill a GPU alone.
const FILLS_A_GPU: usize = 1 << 23;

#[repr(C)]
struct Arguments {
    stride: i64,
    padding: i64,
    groups: i64,
    of_input: bool,
    of_weight: bool,
}

unsafe extern "C" {
    fn drumline_convolution_backward(
        grad: *const C_tensor,
        input: *const C_tensor,
        weight: *const C_tensor,
        with: Arguments,
        of_input: *mut *mut C_tensor,
        of_weight: *mut *mut C_tensor,
    ) -> Message;
}

/// A convolution over images, without bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv2d {
    /// The stride, in both directions.
    pub stride: i64,
    /// Zeros added around an image.
    pub padding: i64,
    /// The number of groups of channels.
    pub groups: i64,
}

impl Default for Conv2d {
    fn default() -> Self {
        Self { stride: 1, padding: 0, groups: 1 }
    }
}

impl Conv2d {
    /// The convolution, as libtorch's `conv2d`. Within [`Beside::forward`] the weight gradient of a small convolution
    /// is computed on a second stream; within [`WeightGrads::forward`] it can be computed apart.
    pub fn forward(self, xs: &Tensor, weight: &Tensor) -> Result<Tensor, TorchError> {
        if let Some(grads) = WeightGrads::current_for(weight) {
            return self.apart(xs, weight, grads);
        }
        match Beside::current().filter(|beside| beside.takes(xs, weight)) {
            Some(beside) => self.beside(xs, weight, beside),
            None => self.plain(xs, weight),
        }
    }

    fn plain(self, xs: &Tensor, weight: &Tensor) -> Result<Tensor, TorchError> {
        let Self { stride, padding, groups } = self;
        Ok(xs.f_conv2d(weight, None::<Tensor>, [stride, stride], [padding, padding], [1i64, 1], groups)?)
    }

    fn apart(self, xs: &Tensor, weight: &Tensor, grads: WeightGrads) -> Result<Tensor, TorchError> {
        let kind = autocast_kind(xs.device())?.unwrap_or(xs.kind());
        let (leaf, weight_kind) = (weight.shallow_clone(), weight.kind());
        let outputs = autograd_function(
            &[xs, weight],
            |cx, inputs| {
                let (xs, weight) = (inputs[0].f_to_kind(kind)?, inputs[1].f_to_kind(kind)?);
                cx.save(&xs);
                cx.save(&weight);
                Ok(vec![self.plain(&xs, &weight)?])
            },
            move |cx, made| {
                let (Some(by_output), [xs, weight]) = (&made[0], cx.saved()) else {
                    return Ok(vec![None, None]);
                };
                let [of_xs, _] = gradients(by_output, xs, weight, self, [cx.needs_input_grad(0), false])?;
                if !cx.needs_input_grad(1) {
                    return Ok(vec![of_xs, None]);
                }
                let [by_output, xs, weight] = [by_output, xs, weight].map(Tensor::shallow_clone);
                let compute = move || {
                    let [_, of_weight] = gradients(&by_output, &xs, &weight, self, [false, true])?;
                    let missing = TorchError::Internal { what: "a convolution's weight has no gradient" };
                    Ok(of_weight.ok_or(missing)?.f_to_kind(weight_kind)?)
                };
                Ok(vec![of_xs, grads.gradient(&leaf, compute)?])
            },
        );
        Ok(outputs?.swap_remove(0))
    }

    fn beside(self, xs: &Tensor, weight: &Tensor, beside: Beside) -> Result<Tensor, TorchError> {
        let kind = autocast_kind(xs.device())?.unwrap_or(xs.kind());
        let leaf = weight.shallow_clone();
        let outputs = autograd_function(
            &[xs, weight],
            |cx, inputs| {
                let (xs, weight) = (inputs[0].f_to_kind(kind)?, inputs[1].f_to_kind(kind)?);
                let made = self.plain(&xs, &weight)?;
                cx.save(&xs);
                cx.save(&weight);
                Ok(vec![made])
            },
            move |cx, grads| {
                let (Some(grad), [xs, weight]) = (&grads[0], cx.saved()) else { return Ok(vec![None, None]) };
                if grad.numel() > FILLS_A_GPU {
                    let [of_xs, of_weight] =
                        gradients(grad, xs, weight, self, [cx.needs_input_grad(0), cx.needs_input_grad(1)])?;
                    return Ok(vec![of_xs, of_weight]);
                }
                if cx.needs_input_grad(1) {
                    beside.weight(&leaf, [grad, xs], || {
                        let [_, of_weight] = gradients(grad, xs, weight, self, [false, true])?;
                        of_weight
                            .ok_or(TorchError::Internal { what: "a convolution's weight has no gradient" })
                    })?;
                }
                let [of_xs, _] = gradients(grad, xs, weight, self, [cx.needs_input_grad(0), false])?;
                Ok(vec![of_xs, None])
            },
        );
        Ok(outputs?.swap_remove(0))
    }
}

/// The gradients of input and weight, each if it is needed.
pub(crate) fn gradients(
    grad: &Tensor,
    xs: &Tensor,
    weight: &Tensor,
    conv: Conv2d,
    [of_input, of_weight]: [bool; 2],
) -> Result<[Option<Tensor>; 2], TorchError> {
    if !of_input && !of_weight {
        return Ok([None, None]);
    }
    let Conv2d { stride, padding, groups } = conv;
    let with = Arguments { stride, padding, groups, of_input, of_weight };
    let mut made = [std::ptr::null_mut(), std::ptr::null_mut()];
    let [first, second] = &mut made;
    // SAFETY: the handles are valid for the call; the results are null or new handles that we own.
    unsafe {
        let message =
            drumline_convolution_backward(grad.as_ptr(), xs.as_ptr(), weight.as_ptr(), with, first, second);
        check(message, "cannot compute the gradients of a convolution")?;
        Ok(made.map(|handle| (!handle.is_null()).then(|| Tensor::from_ptr(handle))))
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Beside>> = const { RefCell::new(None) };
}

/// A second stream, on which weight gradients are computed in parallel with backward. Clones share the stream.
///
/// After a forward in [`forward`](Self::forward), run its backward in [`backward`](Self::backward): only then the
/// weights get their gradients. Hooks on those weights ([`GradHook`](crate::GradHook)) are not called.
///
/// ```no_run
/// use drumline_torch::{Beside, Conv2d, TorchError, cuda};
/// use tch::{Device, Kind, Tensor};
///
/// cuda::open()?;
/// let beside = Beside::new(0)?;
/// let weight = Tensor::ones([8, 8, 3, 3], (Kind::Float, Device::Cuda(0))).set_requires_grad(true);
/// let images = Tensor::ones([2, 8, 16, 16], (Kind::Float, Device::Cuda(0)));
/// let loss = beside.forward(|| Conv2d::default().forward(&images, &weight))?.sum(Kind::Float);
/// beside.backward(|| Ok::<_, TorchError>(loss.f_backward()?))?;
/// assert!(weight.grad().defined());
/// # Ok::<(), TorchError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Beside(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    stream: Stream,
    begun: Mutex<Begun>,
}

/// The work on the stream in this backward.
#[derive(Debug, Default)]
struct Begun {
    /// Whether there is any: a graph recording must not wait for a stream that it does not include.
    is_any: bool,
    computed: Vec<Computed>,
}

/// A gradient, and the tensors from which it is computed, which must live until then.
#[derive(Debug)]
struct Computed {
    weight: Tensor,
    grad: Tensor,
    _from: [Tensor; 2],
}

impl Beside {
    /// A second stream of a GPU.
    pub fn new(device: usize) -> Result<Self, TorchError> {
        let stream = Stream::new(device, Priority::Normal)?;
        Ok(Self(Arc::new(Shared { stream, begun: Mutex::default() })))
    }

    /// Runs `forward`. The backward of its convolutions computes weight gradients on the second stream.
    pub fn forward<R>(&self, forward: impl FnOnce() -> R) -> R {
        /// Restores the previous value, also after a panic.
        struct Restored(Option<Beside>);
        impl Drop for Restored {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restored = Restored(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// Runs a backward. Afterwards all weights have their gradients.
    pub fn backward<E: From<TorchError>>(&self, backward: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let ended = backward();
        let Begun { is_any, computed } = std::mem::take(&mut *self.begun());
        let stream = self.0.stream;
        // Also after an error: the memory of these tensors is reused, and a graph recording must join all its streams.
        if is_any {
            Stream::current(stream.device())?.wait_for_stream(stream)?;
        }
        ended?;
        for Computed { weight, grad: new, .. } in &computed {
            match grad(weight)? {
                Some(mut before) => drop(before.f_add_(new).map_err(TorchError::from)?),
                None => set_grad(weight, Some(new))?,
            }
        }
        Ok(())
    }

    fn begun(&self) -> MutexGuard<'_, Begun> {
        self.0.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one of the forward that runs on this thread.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    fn takes(&self, xs: &Tensor, weight: &Tensor) -> bool {
        let device = Device::Cuda(self.0.stream.device());
        xs.device() == device && weight.device() == device && weight.is_leaf() && weight.requires_grad()
    }

    /// Computes a weight gradient on the second stream, from tensors of the current stream.
    fn weight(
        &self,
        weight: &Tensor,
        from: [&Tensor; 2],
        compute: impl FnOnce() -> Result<Tensor, TorchError>,
    ) -> Result<(), TorchError> {
        let stream = self.0.stream;
        self.begun().is_any = true;
        stream.wait_for_stream(Stream::current(stream.device())?)?;
        let grad = {
            let _scope = stream.enter()?;
            // As autograd does it: the fused optimizers ignore strides.
            with_layout_of(&compute()?, weight)?
        };
        let computed =
            Computed { weight: weight.shallow_clone(), grad, _from: from.map(Tensor::shallow_clone) };
        self.begun().computed.push(computed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    fn waves(size: &[i64], speed: f64) -> Tensor {
        let count = size.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * speed).sin().view(size)
    }

    #[test]
    fn separate_gradients_equal_libtorchs() {
        let conv = Conv2d { stride: 2, padding: 1, groups: 2 };
        let xs = waves(&[2, 4, 7, 9], 0.37).set_requires_grad(true);
        let weight = waves(&[6, 2, 3, 3], 0.11).set_requires_grad(true);
        let y = conv.forward(&xs, &weight).unwrap();
        let by_y = waves(&y.size(), 0.05);
        (&y * &by_y).sum(Kind::Float).backward();
        let [of_xs, nothing] = gradients(&by_y, &xs, &weight, conv, [true, false]).unwrap();
        assert!(nothing.is_none() && of_xs.unwrap().allclose(&xs.grad(), 1e-5, 1e-6, false));
        let [nothing, of_weight] = gradients(&by_y, &xs, &weight, conv, [false, true]).unwrap();
        assert!(nothing.is_none() && of_weight.unwrap().allclose(&weight.grad(), 1e-5, 1e-6, false));
    }

    #[test]
    fn wrong_shapes_are_an_error() {
        let (xs, weight) = (waves(&[1, 3, 4, 4], 0.1), waves(&[2, 3, 3, 3], 0.1));
        assert!(
            gradients(&waves(&[1, 5, 2, 2], 0.1), &xs, &weight, Conv2d::default(), [true, true]).is_err()
        );
    }
}
