//! Layers whose weight gradients can be computed apart from the rest of backward, for pipelines: the stage before waits for
//! the gradient of the input, and nobody waits for those of the weights.
//!
//! ```text
//!   backward   dY ─▶ dX = dY · W ─▶ the layer before        and (X, dY, W) ─▶ queue
//!   later      queue ─▶ dW = dYᵀ · X ─▶ added to the gradient of W
//! ```
//! Layers queue (X, dY, W) in their own backward, so that no graph is kept, and what the queue holds is what is needed. The
//! gradients have the same bits as those of a whole backward: they are made by the same operations and added in the same
//! order. Biases and norms are part of backward.
//!
//! Not here: when weight gradients are computed.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use crate::autocast::autocast_kind;
use crate::error::TorchError;
use crate::function::autograd_function;
use crate::grad::{grad, set_grad};
use crate::memory_format::with_layout_of;

type Compute = Box<dyn FnOnce() -> Result<Tensor, TorchError> + Send>;

/// A weight gradient that is not computed yet.
struct Queued {
    weight: Tensor,
    compute: Compute,
}

#[derive(Default)]
struct Shared {
    is_apart: AtomicBool,
    queue: Mutex<Vec<Queued>>,
}

/// Decides whether backward computes weight gradients or queues them. Clones share the queue.
///
/// ```
/// use drumline_torch::{WeightGrads, linear};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([3, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let x = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let grads = WeightGrads::default();
/// let loss = grads.forward(|| linear(&x, &weight, None))?.sum(Kind::Float);
/// let later = grads.apart(|| loss.f_backward())?;
/// assert!(x.grad().defined() && !weight.grad().defined());
/// later.compute()?;
/// assert_eq!(weight.grad(), Tensor::full([3, 2], 4.0, (Kind::Float, Device::Cpu)));
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Clone, Default)]
pub struct WeightGrads(Arc<Shared>);

impl std::fmt::Debug for WeightGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WeightGrads").field("queued", &self.queue().len()).finish_non_exhaustive()
    }
}

thread_local! {
    static CURRENT: RefCell<Option<WeightGrads>> = const { RefCell::new(None) };
}

impl WeightGrads {
    /// Runs a forward. In its backwards the layers of this module ask this whether to queue.
    pub fn forward<R>(&self, forward: impl FnOnce() -> R) -> R {
        /// Restores the previous value, also after a panic.
        struct Restored(Option<WeightGrads>);
        impl Drop for Restored {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restored = Restored(CURRENT.replace(Some(self.clone())));
        forward()
    }

    /// Runs a backward that queues weight gradients, and returns these. Any other backward computes them at once.
    pub fn apart<E>(&self, backward: impl FnOnce() -> Result<(), E>) -> Result<QueuedGrads, E> {
        /// Ends it, also after a panic: what was queued is of a backward that has not ended.
        struct Apart<'a>(&'a WeightGrads);
        impl Drop for Apart<'_> {
            fn drop(&mut self) {
                self.0.0.is_apart.store(false, Ordering::Relaxed);
                self.0.queue().clear();
            }
        }
        self.0.is_apart.store(true, Ordering::Relaxed);
        let _apart = Apart(self);
        backward()?;
        Ok(QueuedGrads(std::mem::take(&mut *self.queue())))
    }

    fn queue(&self) -> MutexGuard<'_, Vec<Queued>> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// That of the forward on this thread, if it can have the gradient of this weight. A gradient that belongs to no leaf
    /// must pass through autograd.
    pub(crate) fn current_for(weight: &Tensor) -> Option<Self> {
        let is_leaf = weight.is_leaf() && weight.requires_grad();
        CURRENT.with_borrow(Clone::clone).filter(|_| is_leaf)
    }

    /// The gradient of a weight, or `None` if it was queued.
    pub(crate) fn gradient(
        &self,
        weight: &Tensor,
        compute: impl FnOnce() -> Result<Tensor, TorchError> + Send + 'static,
    ) -> Result<Option<Tensor>, TorchError> {
        if !self.0.is_apart.load(Ordering::Relaxed) {
            return compute().map(Some);
        }
        self.queue().push(Queued { weight: weight.shallow_clone(), compute: Box::new(compute) });
        Ok(None)
    }
}

/// The weight gradients of one backward that are not computed yet.
#[must_use = "weights get their gradients from `compute`"]
pub struct QueuedGrads(Vec<Queued>);

impl std::fmt::Debug for QueuedGrads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("QueuedGrads").field(&self.0.len()).finish()
    }
}

impl QueuedGrads {
    /// The number of gradients.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Computes the gradients, and adds them to those that the weights have. Hooks on the weights
    /// ([`GradHook`](crate::GradHook)) are not called.
    pub fn compute(self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        // As autograd does it: a weight that is used twice has one gradient in a backward, which is then accumulated.
        let mut sums: Vec<(Tensor, Tensor)> = Vec::new();
        for Queued { weight, compute } in self.0 {
            let new = compute()?;
            match sums.iter_mut().find(|(other, _)| other.data_ptr() == weight.data_ptr()) {
                Some((_, sum)) => *sum = sum.f_add(&new)?,
                None => sums.push((weight, new)),
            }
        }
        for (weight, new) in sums {
            match grad(&weight)? {
                Some(mut before) => drop(before.f_add_(&new)?),
                None => set_grad(&weight, Some(&with_layout_of(&new, &weight)?))?,
            }
        }
        Ok(())
    }
}

/// `xs · weightᵀ + bias`, as libtorch's `linear`. Within [`WeightGrads::forward`] the weight's gradient can be computed
/// apart.
pub fn linear(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TorchError> {
    let Some(grads) = WeightGrads::current_for(weight) else { return Ok(xs.f_linear(weight, bias)?) };
    let kind = autocast_kind(xs.device())?.unwrap_or(xs.kind());
    let (leaf, weight_kind, size) = (weight.shallow_clone(), weight.kind(), xs.size());
    let bias_kind = bias.map(Tensor::kind);
    let inputs: Vec<&Tensor> = [xs, weight].into_iter().chain(bias).collect();
    let count = inputs.len();
    let outputs = autograd_function(
        &inputs,
        |cx, inputs| {
            let (xs, weight) = (inputs[0].f_to_kind(kind)?, inputs[1].f_to_kind(kind)?);
            let bias = inputs.get(2).map(|bias| bias.f_to_kind(kind)).transpose()?;
            let made = xs.f_linear(&weight, bias.as_ref())?;
            cx.save(&xs);
            cx.save(&weight);
            Ok(vec![made])
        },
        move |cx, made| {
            let mut of_inputs: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
            let (Some(by_output), [xs, weight]) = (&made[0], cx.saved()) else { return Ok(of_inputs) };
            let rows = by_output.f_reshape([-1, weight.size()[0]])?;
            if cx.needs_input_grad(0) {
                of_inputs[0] = Some(rows.f_mm(weight)?.f_view(&size[..])?);
            }
            if let Some(kind) = bias_kind.filter(|_| cx.needs_input_grad(2)) {
                of_inputs[2] =
                    Some(rows.f_sum_dim_intlist(&[0i64][..], false, None::<Kind>)?.f_to_kind(kind)?);
            }
            if cx.needs_input_grad(1) {
                let xs = xs.f_reshape([-1, weight.size()[1]])?;
                of_inputs[1] = grads.gradient(&leaf, move || {
                    Ok(rows.f_transpose(0, 1)?.f_mm(&xs)?.f_to_kind(weight_kind)?)
                })?;
            }
            Ok(of_inputs)
        },
    );
    Ok(outputs?.swap_remove(0))
}

/// `rows · weight + bias` of 2-dimensional tensors, as libtorch's `addmm` and `mm`. Within [`WeightGrads::forward`] the
/// weight's gradient can be computed apart.
pub fn addmm(bias: Option<&Tensor>, rows: &Tensor, weight: &Tensor) -> Result<Tensor, TorchError> {
    let plain = |bias: Option<&Tensor>, rows: &Tensor, weight: &Tensor| match bias {
        Some(bias) => bias.f_addmm(rows, weight),
        None => rows.f_mm(weight),
    };
    let Some(grads) = WeightGrads::current_for(weight) else { return Ok(plain(bias, rows, weight)?) };
    let kind = autocast_kind(rows.device())?.unwrap_or(rows.kind());
    let (leaf, weight_kind) = (weight.shallow_clone(), weight.kind());
    let bias_kind = bias.map(Tensor::kind);
    let inputs: Vec<&Tensor> = [rows, weight].into_iter().chain(bias).collect();
    let count = inputs.len();
    let outputs = autograd_function(
        &inputs,
        |cx, inputs| {
            let (rows, weight) = (inputs[0].f_to_kind(kind)?, inputs[1].f_to_kind(kind)?);
            let bias = inputs.get(2).map(|bias| bias.f_to_kind(kind)).transpose()?;
            let made = plain(bias.as_ref(), &rows, &weight)?;
            cx.save(&rows);
            cx.save(&weight);
            Ok(vec![made])
        },
        move |cx, made| {
            let mut of_inputs: Vec<Option<Tensor>> = (0..count).map(|_| None).collect();
            let (Some(by_output), [rows, weight]) = (&made[0], cx.saved()) else { return Ok(of_inputs) };
            if cx.needs_input_grad(0) {
                of_inputs[0] = Some(by_output.f_mm(&weight.f_transpose(0, 1)?)?);
            }
            if let Some(kind) = bias_kind.filter(|_| cx.needs_input_grad(2)) {
                of_inputs[2] =
                    Some(by_output.f_sum_dim_intlist(&[0i64][..], false, None::<Kind>)?.f_to_kind(kind)?);
            }
            if cx.needs_input_grad(1) {
                let (rows, by_output) = (rows.shallow_clone(), by_output.shallow_clone());
                of_inputs[1] = grads.gradient(&leaf, move || {
                    Ok(rows.f_transpose(0, 1)?.f_mm(&by_output)?.f_to_kind(weight_kind)?)
                })?;
            }
            Ok(of_inputs)
        },
    );
    Ok(outputs?.swap_remove(0))
}

/// The rows of `weight` at these indices, as libtorch's `embedding`. Within [`WeightGrads::forward`] the weight's gradient
/// can be computed apart.
pub fn embedding(weight: &Tensor, indices: &Tensor) -> Result<Tensor, TorchError> {
    let plain = |weight: &Tensor| Tensor::f_embedding(weight, indices, -1, false, false);
    let Some(grads) = WeightGrads::current_for(weight) else { return Ok(plain(weight)?) };
    let (leaf, num_rows) = (weight.shallow_clone(), weight.size()[0]);
    let outputs = autograd_function(
        &[weight],
        |cx, inputs| {
            cx.save(indices);
            Ok(vec![plain(inputs[0])?])
        },
        move |cx, made| {
            let (Some(by_output), [indices]) = (&made[0], cx.saved()) else { return Ok(vec![None]) };
            let (by_output, indices) = (by_output.shallow_clone(), indices.shallow_clone());
            let compute =
                move || Ok(Tensor::f_embedding_dense_backward(&by_output, &indices, num_rows, -1, false)?);
            Ok(vec![if cx.needs_input_grad(0) { grads.gradient(&leaf, compute)? } else { None }])
        },
    );
    Ok(outputs?.swap_remove(0))
}

#[cfg(test)]
mod tests;
