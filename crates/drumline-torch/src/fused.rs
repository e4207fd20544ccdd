//! The fused optimizers of libtorch: one pass over parameter, gradient and state where separate operations make many.
//!
//! These are the bare kernels, for one list of tensors of one device and kind. They see memory, not strides, so gradients and state
//! must lie as their parameters do; this is checked. [`Sgd`](crate::Sgd) and [`Adam`](crate::Adam) keep the state
//! and make gradients fit.
#![allow(unsafe_code)]

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::TorchError;
use crate::list::{Handles, List};
use crate::status::{Message, check};

unsafe extern "C" {
    fn drumline_fused_sgd(
        params: List,
        grads: List,
        momentum_buffers: List,
        tensors: TensorHandles,
        with: *const SgdArguments,
    ) -> Message;
    fn drumline_fused_adam(
        lists: *const AdamLists,
        tensors: TensorHandles,
        with: *const AdamArguments,
    ) -> Message;
    fn drumline_grad_fitting(leaf: *mut C_tensor, fitting: *mut *mut C_tensor) -> Message;
    fn drumline_is_dense(tensor: *mut C_tensor, dense: *mut bool) -> Message;
}

/// Laid out as `StepTensors` in fused.cpp; null where there is none.
#[repr(C)]
struct TensorHandles {
    lr: *mut C_tensor,
    grad_scale: *mut C_tensor,
    found_inf: *mut C_tensor,
}

#[repr(C)]
struct SgdArguments {
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
}

#[repr(C)]
struct AdamArguments {
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    eps: f64,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
}

#[repr(C)]
struct AdamLists {
    params: List,
    grads: List,
    exp_avgs: List,
    exp_avg_sqs: List,
    max_exp_avg_sqs: List,
    steps: List,
}

/// The learning rate of a fused step.
#[derive(Debug, Clone, Copy)]
pub enum Lr<'a> {
    /// A number.
    Value(f64),
    /// A tensor of one element, read when the kernel runs: a captured graph follows its changes.
    Tensor(&'a Tensor),
}

/// What a step reads on the device while it runs, so that nobody waits for it and a captured graph follows its changes. Each is one number of kind Float.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTensors<'a> {
    /// Where it is 1 the step changes nothing and is not counted; otherwise it is 0.
    pub found_inf: Option<&'a Tensor>,
    /// Gradients are divided by it, in place, before they are used.
    pub grad_scale: Option<&'a Tensor>,
}

impl StepTensors<'_> {
    /// As the shim takes them, with the learning rate where that is a tensor.
    fn handles(&self, lr: Lr<'_>) -> TensorHandles {
        let handle = |tensor: Option<&Tensor>| {
            tensor.map_or(std::ptr::null_mut(), |tensor| tensor.as_ptr().cast_mut())
        };
        let lr = match lr {
            Lr::Value(_) => None,
            Lr::Tensor(lr) => Some(lr),
        };
        TensorHandles {
            lr: handle(lr),
            grad_scale: handle(self.grad_scale),
            found_inf: handle(self.found_inf),
        }
    }
}

impl Lr<'_> {
    /// The number, if it is one.
    fn value(self) -> f64 {
        match self {
            Self::Value(lr) => lr,
            Self::Tensor(_) => 0.0,
        }
    }
}

/// One step of SGD on some parameters.
#[derive(Debug)]
pub struct FusedSgd<'a> {
    /// What is trained.
    pub params: &'a [&'a Tensor],
    /// A gradient for each.
    pub grads: &'a [&'a Tensor],
    /// A buffer for each; none if there is no momentum.
    pub momentum_buffers: &'a [&'a Tensor],
    /// Learning rate.
    pub lr: Lr<'a>,
    /// How much of the buffer is kept.
    pub momentum: f64,
    /// How much of the gradient is kept out of the buffer, but for the first step.
    pub dampening: f64,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f64,
    /// Whether the step looks ahead by the momentum.
    pub nesterov: bool,
    /// Whether the step goes up instead of down.
    pub maximize: bool,
    /// Whether the buffers hold nothing yet: they become the gradients.
    pub is_first_step: bool,
    /// What is read on the device.
    pub tensors: StepTensors<'a>,
}

impl FusedSgd<'_> {
    /// Changes the parameters and the buffers.
    pub fn run(&self) -> Result<(), TorchError> {
        let [params, grads, buffers] = [self.params, self.grads, self.momentum_buffers].map(Handles::of);
        let with = SgdArguments {
            lr: self.lr.value(),
            momentum: self.momentum,
            dampening: self.dampening,
            weight_decay: self.weight_decay,
            nesterov: self.nesterov,
            maximize: self.maximize,
            is_first_step: self.is_first_step,
        };
        // SAFETY: all handles are good for the call, which checks the lists.
        let message = unsafe {
            let tensors = self.tensors.handles(self.lr);
            drumline_fused_sgd(params.list(), grads.list(), buffers.list(), tensors, &with)
        };
        check(message, "cannot make a step of SGD")
    }
}

/// How a fused Adam applies its weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDecay {
    /// Added to the gradient: Adam.
    L2,
    /// Taken off the parameter: AdamW.
    Decoupled,
}

/// One step of Adam or AdamW on some parameters.
#[derive(Debug)]
pub struct FusedAdam<'a> {
    /// What is trained.
    pub params: &'a [&'a Tensor],
    /// A gradient for each.
    pub grads: &'a [&'a Tensor],
    /// A running mean of the gradient for each.
    pub exp_avgs: &'a [&'a Tensor],
    /// A running mean of the squared gradient for each.
    pub exp_avg_sqs: &'a [&'a Tensor],
    /// The greatest `exp_avg_sqs` so far for each: AMSGrad. None if that is not wanted.
    pub max_exp_avg_sqs: Option<&'a [&'a Tensor]>,
    /// How many steps each parameter has made before this one: one number of kind Float each.
    pub steps: &'a [&'a Tensor],
    /// Learning rate.
    pub lr: Lr<'a>,
    /// How much of the running means is kept.
    pub betas: (f64, f64),
    /// Added to the divisor.
    pub eps: f64,
    /// How much of the parameter decays.
    pub weight_decay: f64,
    /// In which way it does.
    pub decay: WeightDecay,
    /// Whether the step goes up instead of down.
    pub maximize: bool,
    /// What is read on the device.
    pub tensors: StepTensors<'a>,
}

impl FusedAdam<'_> {
    /// Changes the parameters and the running means, and counts the step.
    pub fn run(&self) -> Result<(), TorchError> {
        let max = self.max_exp_avg_sqs.unwrap_or(&[]);
        let handles =
            [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, max, self.steps].map(Handles::of);
        let [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps] =
            handles.each_ref().map(Handles::list);
        let lists = AdamLists { params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps };
        let with = AdamArguments {
            lr: self.lr.value(),
            beta1: self.betas.0,
            beta2: self.betas.1,
            weight_decay: self.weight_decay,
            eps: self.eps,
            amsgrad: self.max_exp_avg_sqs.is_some(),
            maximize: self.maximize,
            decoupled: self.decay == WeightDecay::Decoupled,
        };
        // SAFETY: all handles are good for the call, which checks the lists.
        let message = unsafe { drumline_fused_adam(&lists, self.tensors.handles(self.lr), &with) };
        check(message, "cannot make a step of Adam")
    }
}

/// The leaf's gradient as the kernels need it: itself if it lies in memory as the leaf does, else a copy that does.
pub(crate) fn fitting_grad(leaf: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let mut grad = std::ptr::null_mut();
    // SAFETY: both pointers are good for the call; what comes back is a new handle, ours, or null.
    unsafe {
        check(drumline_grad_fitting(leaf.as_ptr().cast_mut(), &mut grad), "cannot use a gradient")?;
        Ok((!grad.is_null()).then(|| Tensor::from_ptr(grad)))
    }
}

/// Whether the tensor's elements fill their memory without gaps or overlaps.
pub(crate) fn is_dense(tensor: &Tensor) -> Result<bool, TorchError> {
    let mut dense = false;
    // SAFETY: writes one bool.
    let message = unsafe { drumline_is_dense(tensor.as_ptr().cast_mut(), &mut dense) };
    check(message, "cannot look at a tensor")?;
    Ok(dense)
}

#[cfg(test)]
mod tests;
