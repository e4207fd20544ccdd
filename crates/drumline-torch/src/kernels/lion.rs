//! Lion on slices of host memory: one pass over weights, gradients and the running mean.

use super::floats::for_instruction_sets;
use super::weights::{Elements, Grad, Weight, with_slices};

/// The settings of one step of Lion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LionStep {
    pub(crate) lr: f64,
    pub(crate) betas: (f64, f64),
    pub(crate) weight_decay: f64,
    /// Gradients are multiplied by it.
    pub(crate) grad_factor: f32,
}

for_instruction_sets! {
    /// Changes the weights by the sign of the interpolated mean, and then the mean.
    pub(crate) fn lion(elements: &mut Elements<'_>, exp_avg: &mut [f32], with: LionStep) {
        let Elements { weights, grads } = elements;
        with_slices!((weights, grads), |w, twins, g| step_elements(w, twins, g, exp_avg, with));
    }
}

#[inline(always)]
fn step_elements<W: Weight<T>, T: Copy, G: Grad>(
    weights: &mut [W],
    twins: &mut [T],
    grads: &[G],
    means: &mut [f32],
    with: LionStep,
) {
    let LionStep { lr, betas: (beta1, beta2), weight_decay, grad_factor } = with;
    let (kept, lr) = ((1.0 - lr * weight_decay) as f32, lr as f32);
    let [(beta1, rest1), (beta2, rest2)] = [beta1, beta2].map(|beta| (beta as f32, (1.0 - beta) as f32));
    let num = grads.len();
    let (weights, twins, means) = (&mut weights[..num], &mut twins[..num], &mut means[..num]);
    for at in 0..num {
        let (w, g) = (weights[at].number(twins[at]), grads[at].number() * grad_factor);
        let between = means[at] * beta1 + g * rest1;
        let sign = f32::from(u8::from(between > 0.0)) - f32::from(u8::from(between < 0.0));
        (weights[at], twins[at]) = W::of(w * kept - lr * sign);
        means[at] = means[at] * beta2 + g * rest2;
    }
}
