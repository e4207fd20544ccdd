//! LAMB on slices of host memory, in two passes: the step of a tensor depends on two norms of all its elements.
//!
//! ```text
//!   1  gradients ─▶ running means ─▶ direction r ─▶ ‖w‖², ‖r‖²
//!   2  weights, running means ─▶ the same r ─▶ weights
//! ```

use super::floats::for_instruction_sets;
use super::weights::{CHUNK, Chunk, Elements, sum_of_squares};

/// The settings of one step of LAMB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LambStep {
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    /// Gradients are multiplied by it.
    pub(crate) grad_factor: f32,
    /// The running means are divided by these.
    pub(crate) corrections: (f64, f64),
}

/// The running means of gradients and of their squares.
#[derive(Debug)]
pub(crate) struct LambMeans<'a> {
    pub(crate) exp_avg: &'a mut [f32],
    pub(crate) exp_avg_sq: &'a mut [f32],
}

/// What a direction needs, in f32.
#[derive(Clone, Copy)]
struct Direction {
    correction1: f32,
    root_of_correction2: f32,
    eps: f32,
    weight_decay: f32,
}

impl Direction {
    fn of(with: &LambStep) -> Self {
        Self {
            correction1: with.corrections.0 as f32,
            root_of_correction2: with.corrections.1.sqrt() as f32,
            eps: with.eps as f32,
            weight_decay: with.weight_decay as f32,
        }
    }

    #[inline(always)]
    fn at(self, w: f32, mean: f32, square: f32) -> f32 {
        let adam = mean / self.correction1 / (square.sqrt() / self.root_of_correction2 + self.eps);
        adam + self.weight_decay * w
    }
}

for_instruction_sets! {
    /// Updates the means. Returns the sums of squares of the weights and of the direction.
    pub(crate) fn lamb_means(elements: &Elements<'_>, means: &mut LambMeans<'_>, with: LambStep) -> [f64; 2] {
        let (direction, (beta1, beta2)) = (Direction::of(&with), with.betas);
        let (rest1, beta2, rest2) = ((1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32);
        let (mut w, mut g, mut sums) = (Chunk::new(), Chunk::new(), [0.0; 2]);
        let chunks = means.exp_avg.chunks_mut(CHUNK).zip(means.exp_avg_sq.chunks_mut(CHUNK));
        for (nth, (means, squares)) in chunks.enumerate() {
            let (at, w, g) = (nth * CHUNK, &mut w.0[..means.len()], &mut g.0[..means.len()]);
            elements.weights.load(at, w);
            elements.grads.load(at, g, with.grad_factor);
            sums[0] += sum_of_squares(w);
            for (((w, g), mean), square) in w.iter().zip(g.iter_mut()).zip(means).zip(squares) {
                *mean += rest1 * (*g - *mean);
                *square = *square * beta2 + rest2 * *g * *g;
                *g = direction.at(*w, *mean, *square);
            }
            sums[1] += sum_of_squares(g);
        }
        sums
    }
}

for_instruction_sets! {
    /// Changes the weights by `step_size` in the direction of the means.
    pub(crate) fn lamb_weights(elements: &mut Elements<'_>, means: &LambMeans<'_>, with: LambStep, step_size: f32) {
        let (direction, mut w) = (Direction::of(&with), Chunk::new());
        let chunks = means.exp_avg.chunks(CHUNK).zip(means.exp_avg_sq.chunks(CHUNK));
        for (nth, (means, squares)) in chunks.enumerate() {
            let (at, w) = (nth * CHUNK, &mut w.0[..means.len()]);
            elements.weights.load(at, w);
            for ((w, mean), square) in w.iter_mut().zip(means).zip(squares) {
                *w -= step_size * direction.at(*w, *mean, *square);
            }
            elements.weights.store(at, w);
        }
    }
}
