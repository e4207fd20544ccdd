//! libtorch's fused optimizers: one pass over parameter, gradient and state.
//!
//! These are the bare kernels, for one list of tensors of one device and kind. They ignore strides, so that gradients
//! and state must have the memory layout of their parameters; this is checked. [`Sgd`](crate::Sgd) and
//! [`Adam`](crate::Adam) keep the state and copy gradients that have another layout.
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
    fn drumline_fused_adagrad(
        params: List,
        grads: List,
        sums: List,
        steps: List,
        tensors: TensorHandles,
        with: *const AdagradArguments,
    ) -> Message;
    fn drumline_fused_adam(
        lists: *const AdamLists,
        tensors: TensorHandles,
        with: *const AdamArguments,
    ) -> Message;
    fn drumline_grad_fitting(leaf: *mut C_tensor, fitting: *mut *mut C_tensor) -> Message;
    fn drumline_is_dense(tensor: *mut C_tensor, dense: *mut bool) -> Message;
}

/// The layout is that of `StepTensors` in fused.cpp; null for `None`.
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
struct AdagradArguments {
    lr: f64,
    lr_decay: f64,
    weight_decay: f64,
    eps: f64,
    maximize: bool,
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
    /// A tensor of one element that the kernel reads, so that a captured graph uses its current value.
    Tensor(&'a Tensor),
}

/// Tensors that a step reads on the device, so that the host does not wait and a captured graph uses their current
/// values. Each is one number of kind Float.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTensors<'a> {
    /// 1 if the step must be skipped: it then changes nothing and is not counted. Otherwise 0.
    pub found_inf: Option<&'a Tensor>,
    /// Gradients are divided by it in place before they are used.
    pub grad_scale: Option<&'a Tensor>,
}

impl StepTensors<'_> {
    /// The handles for the shim, with the learning rate if that is a tensor.
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
    /// The value, or 0 if it is a tensor.
    fn value(self) -> f64 {
        match self {
            Self::Value(lr) => lr,
            Self::Tensor(_) => 0.0,
        }
    }
}

/// One step of SGD.
#[derive(Debug)]
pub struct FusedSgd<'a> {
    /// The parameters.
    pub params: &'a [&'a Tensor],
    /// A gradient for each parameter.
    pub grads: &'a [&'a Tensor],
    /// A buffer for each parameter; empty without momentum.
    pub momentum_buffers: &'a [&'a Tensor],
    /// Learning rate.
    pub lr: Lr<'a>,
    /// The momentum.
    pub momentum: f64,
    /// The dampening, which does not apply to the first step.
    pub dampening: f64,
    /// The weight decay, which adds a part of the parameter to its gradient.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
    /// Whether this is the first step, in which the buffers become the gradients.
    pub is_first_step: bool,
    /// Tensors that the step reads on the device.
    pub tensors: StepTensors<'a>,
}

impl FusedSgd<'_> {
    /// Updates the parameters and the buffers.
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
        // SAFETY: all handles are valid for the call, which checks the lists.
        let message = unsafe {
            let tensors = self.tensors.handles(self.lr);
            drumline_fused_sgd(params.list(), grads.list(), buffers.list(), tensors, &with)
        };
        check(message, "cannot make an SGD step")
    }
}

/// One step of Adagrad.
#[derive(Debug)]
pub struct FusedAdagrad<'a> {
    /// The parameters.
    pub params: &'a [&'a Tensor],
    /// A gradient for each parameter.
    pub grads: &'a [&'a Tensor],
    /// A sum of the squared gradients for each parameter.
    pub sums: &'a [&'a Tensor],
    /// The number of steps of each parameter before this one: a tensor of one element of kind Float each.
    pub steps: &'a [&'a Tensor],
    /// Learning rate.
    pub lr: Lr<'a>,
    /// How fast the learning rate falls with the steps.
    pub lr_decay: f64,
    /// The weight decay, which adds a part of the parameter to its gradient.
    pub weight_decay: f64,
    /// Adagrad's epsilon.
    pub eps: f64,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
    /// Tensors that the step reads on the device.
    pub tensors: StepTensors<'a>,
}

impl FusedAdagrad<'_> {
    /// Updates the parameters and the sums, and counts the step.
    pub fn run(&self) -> Result<(), TorchError> {
        let handles = [self.params, self.grads, self.sums, self.steps].map(Handles::of);
        let [params, grads, sums, steps] = handles.each_ref().map(Handles::list);
        let with = AdagradArguments {
            lr: self.lr.value(),
            lr_decay: self.lr_decay,
            weight_decay: self.weight_decay,
            eps: self.eps,
            maximize: self.maximize,
        };
        // SAFETY: all handles are valid for the call, which checks the lists.
        let message = unsafe {
            drumline_fused_adagrad(params, grads, sums, steps, self.tensors.handles(self.lr), &with)
        };
        check(message, "cannot make an Adagrad step")
    }
}

/// How a fused Adam applies its weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDecay {
    /// It is added to the gradient: Adam.
    L2,
    /// It is subtracted from the parameter: AdamW.
    Decoupled,
}

/// One step of Adam or AdamW.
#[derive(Debug)]
pub struct FusedAdam<'a> {
    /// The parameters.
    pub params: &'a [&'a Tensor],
    /// A gradient for each parameter.
    pub grads: &'a [&'a Tensor],
    /// A running mean of the gradient for each parameter.
    pub exp_avgs: &'a [&'a Tensor],
    /// A running mean of the squared gradient for each parameter.
    pub exp_avg_sqs: &'a [&'a Tensor],
    /// The maximum of `exp_avg_sqs` so far for each parameter: AMSGrad. `None` without AMSGrad.
    pub max_exp_avg_sqs: Option<&'a [&'a Tensor]>,
    /// The number of steps of each parameter before this one: a tensor of one element of kind Float each.
    pub steps: &'a [&'a Tensor],
    /// Learning rate.
    pub lr: Lr<'a>,
    /// Adam's betas.
    pub betas: (f64, f64),
    /// Adam's epsilon.
    pub eps: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// How the weight decay applies.
    pub decay: WeightDecay,
    /// Whether to maximize instead of minimize.
    pub maximize: bool,
    /// Tensors that the step reads on the device.
    pub tensors: StepTensors<'a>,
}

impl FusedAdam<'_> {
    /// Updates the parameters and the running means, and counts the step.
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
        // SAFETY: all handles are valid for the call, which checks the lists.
        let message = unsafe { drumline_fused_adam(&lists, self.tensors.handles(self.lr), &with) };
        check(message, "cannot make an Adam step")
    }
}

/// The leaf's gradient with the leaf's memory layout: the gradient itself if it has it, else a copy.
pub(crate) fn grad_with_layout(leaf: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let mut grad = std::ptr::null_mut();
    // SAFETY: both pointers are valid for the call; the result is null or a new handle that we own.
    unsafe {
        check(drumline_grad_fitting(leaf.as_ptr().cast_mut(), &mut grad), "cannot use a gradient")?;
        Ok((!grad.is_null()).then(|| Tensor::from_ptr(grad)))
    }
}

/// Whether the tensor has no gaps or overlaps in memory.
pub(crate) fn is_dense(tensor: &Tensor) -> Result<bool, TorchError> {
    let mut dense = false;
    // SAFETY: writes one bool.
    let message = unsafe { drumline_is_dense(tensor.as_ptr().cast_mut(), &mut dense) };
    check(message, "cannot inspect a tensor")?;
    Ok(dense)
}

#[cfg(test)]
mod tests;
