//! Lion on slices of host memory: one pass over weights, gradients and the running mean.

use super::floats::for_instruction_sets;
use super::weights::{CHUNK, Chunk, Elements};

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
        let LionStep { lr, betas: (beta1, beta2), weight_decay, grad_factor } = with;
        let (kept, lr) = ((1.0 - lr * weight_decay) as f32, lr as f32);
        let [(beta1, rest1), (beta2, rest2)] = [beta1, beta2].map(|beta| (beta as f32, (1.0 - beta) as f32));
        let (mut w, mut g) = (Chunk::new(), Chunk::new());
        for (nth, means) in exp_avg.chunks_mut(CHUNK).enumerate() {
            let (at, w, g) = (nth * CHUNK, &mut w.0[..means.len()], &mut g.0[..means.len()]);
            elements.weights.load(at, w);
            elements.grads.load(at, g, grad_factor);
            for ((w, g), mean) in w.iter_mut().zip(g.iter()).zip(means) {
                let between = *mean * beta1 + g * rest1;
                let sign = f32::from(u8::from(between > 0.0)) - f32::from(u8::from(between < 0.0));
                *w = *w * kept - lr * sign;
                *mean = *mean * beta2 + g * rest2;
            }
            elements.weights.store(at, w);
        }
    }
}
