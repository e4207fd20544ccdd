//! Adam and AdamW on slices of host memory: one pass over weights, gradients and moments.
//!
//! ```text
//!   256 elements at a time, in the innermost cache:
//!   weights  f32 │ f32 and bf16 │ split ─▶ w ─┐                    ┌─▶ w ─▶ weights
//!   grads    f32 │ bf16 ────────────────▶ g ─┼─ the rule, in f32 ─┤
//!   moments  f32 │ bf16 │ 8 bits ─────▶ m, v ─┘                    └─▶ m, v ─▶ moments
//! ```
//! An element's result depends on that element alone (with moments in 8 bits: on its block), so that slices may be cut
//! anywhere, and at the ends of rows with moments in 8 bits.
//!
//! Not here: tensors and the number of steps (`optim`), and AMSGrad, which libtorch's kernels have.

mod moments;

use crate::error::TorchError;
use crate::fused::WeightDecay;

use super::code_map::{BLOCK, CodeMap};
use super::floats::for_instruction_sets;
use super::random::Draw;
use super::weights::{Chunk, Grad, GradSlices, Weight, WeightSlices, with_slices};
use moments::Mean;
pub use moments::{Codes, MomentSlices};

/// The settings of one step of Adam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the running means of the gradient and of the squared gradient.
    pub betas: (f64, f64),
    /// Epsilon, which is added to the divisor.
    pub eps: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// How the weight decay applies.
    pub decay: WeightDecay,
    /// The number of this step; the first is 1.
    pub step: u64,
    /// Gradients are multiplied by it: 1, −1 to maximize, less to clip or to undo a loss scale.
    pub grad_factor: f32,
}

/// The elements that a step changes, with their gradients.
///
/// ```
/// use drumline_torch::{AdamSlices, AdamStep, GradSlices, MomentSlices, WeightDecay, WeightSlices};
///
/// let (mut weights, mut exp_avg, mut exp_avg_sq) = ([1f32; 3], [0f32; 3], [0f32; 3]);
/// let step = AdamStep {
///     lr: 0.1,
///     betas: (0.9, 0.999),
///     eps: 1e-8,
///     weight_decay: 0.0,
///     decay: WeightDecay::Decoupled,
///     step: 1,
///     grad_factor: 1.0,
/// };
/// AdamSlices {
///     weights: WeightSlices::F32(&mut weights),
///     grads: GradSlices::F32(&[2.0, -2.0, 0.0]),
///     moments: MomentSlices::F32 { exp_avg: &mut exp_avg, exp_avg_sq: &mut exp_avg_sq },
/// }
/// .step(&step)?;
/// assert!((weights[0] - 0.9).abs() < 1e-6 && (weights[1] - 1.1).abs() < 1e-6 && weights[2] == 1.0);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
#[derive(Debug)]
pub struct AdamSlices<'a> {
    /// The weights.
    pub weights: WeightSlices<'a>,
    /// Their gradients.
    pub grads: GradSlices<'a>,
    /// Their running means.
    pub moments: MomentSlices<'a>,
}

/// What the rule needs, in f32.
#[derive(Debug, Clone, Copy)]
struct Constants {
    grad_factor: f32,
    /// The weight decay that is added to gradients.
    l2: f32,
    /// What a decoupled weight decay leaves of a weight.
    kept: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    root_of_correction2: f32,
    eps: f32,
    step_size: f32,
    /// The random bits of means in bf16.
    draw: Draw,
}

impl Constants {
    fn of(with: &AdamStep) -> Self {
        let AdamStep { lr, betas: (beta1, beta2), eps, weight_decay, decay, step, grad_factor } = *with;
        let is_decoupled = decay == WeightDecay::Decoupled;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Self {
            grad_factor,
            l2: if is_decoupled { 0.0 } else { weight_decay as f32 },
            kept: if is_decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_of_correction2: correction(beta2).sqrt() as f32,
            eps: eps as f32,
            step_size: (lr / correction(beta1)) as f32,
            draw: Draw::default(),
        }
    }
}

impl AdamSlices<'_> {
    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.grads.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements before `at`, and those from it on: for several threads. With moments in 8 bits `at` is the end of a
    /// row.
    ///
    /// # Panics
    /// If there are fewer elements, or `at` is within a row of moments in 8 bits.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let (weights, other_weights) = self.weights.split_at(at);
        let (grads, other_grads) = self.grads.split_at(at);
        let (moments, other_moments) = self.moments.split_at(at);
        let after = Self { weights: other_weights, grads: other_grads, moments: other_moments };
        (Self { weights, grads, moments }, after)
    }

    /// Makes a step on this thread.
    pub fn step(&mut self, with: &AdamStep) -> Result<(), TorchError> {
        self.check()?;
        self.run(with);
        Ok(())
    }

    /// Returns an error unless there are as many gradients and moments as weights.
    pub(crate) fn check(&self) -> Result<(), TorchError> {
        let num = self.grads.len();
        if self.weights.len() == Some(num) && self.moments.len() == Some(num) {
            return Ok(());
        }
        Err(TorchError::Unsupported {
            operation: "make a step of Adam",
            reason: "there are not as many gradients and moments as weights",
        })
    }

    /// Makes a step of slices that were [checked](Self::check).
    pub(crate) fn run(&mut self, with: &AdamStep) {
        step_slices(self, Constants::of(with));
    }
}

for_instruction_sets! {
    fn step_slices(slices: &mut AdamSlices<'_>, with: Constants) {
        let AdamSlices { weights, grads, moments } = slices;
        match moments {
            MomentSlices::F32 { exp_avg, exp_avg_sq } => with_slices!((weights, grads), |w, twins, g| {
                step_elements(w, twins, g, exp_avg, exp_avg_sq, with)
            }),
            MomentSlices::Bf16 { exp_avg, exp_avg_sq, draw } => with_slices!((weights, grads), |w, twins, g| {
                step_elements(w, twins, g, exp_avg, exp_avg_sq, Constants { draw: *draw, ..with })
            }),
            MomentSlices::EightBit { exp_avg, exp_avg_sq, row_len } => with_slices!((weights, grads), |w, twins, g| {
                step_blocks(w, twins, g, Blocks { means: exp_avg, squares: exp_avg_sq, row_len: *row_len }, with)
            }),
        }
    }
}

/// Means in 8 bits.
struct Blocks<'a, 'b> {
    means: &'a mut Codes<'b>,
    squares: &'a mut Codes<'b>,
    row_len: usize,
}

/// One loop over elements, without buffers, so that a processor reads the next ones while it computes. Slices are arguments
/// of their own and not fields: only so the compiler knows that they do not overlap, and uses vectors.
#[inline(always)]
fn step_elements<W: Weight<T>, T: Copy, G: Grad, M: Mean>(
    weights: &mut [W],
    twins: &mut [T],
    grads: &[G],
    means: &mut [M],
    squares: &mut [M],
    with: Constants,
) {
    let num = grads.len();
    let (weights, twins) = (&mut weights[..num], &mut twins[..num]);
    let (means, squares) = (&mut means[..num], &mut squares[..num]);
    for at in 0..num {
        let (w, g) = (weights[at].number(twins[at]), grads[at].number());
        let (w, m, v) = step(w, g, means[at].number(), squares[at].number(), &with);
        (weights[at], twins[at]) = W::of(w);
        let random = if M::IS_ROUNDED { with.draw.bits(at) } else { 0 };
        (means[at], squares[at]) = (M::of(m, random), M::of(v, random >> 16));
    }
}

/// Blocks of means in 8 bits.
#[inline(always)]
fn step_blocks<W: Weight<T>, T: Copy, G: Grad>(
    weights: &mut [W],
    twins: &mut [T],
    grads: &[G],
    blocks: Blocks<'_, '_>,
    with: Constants,
) {
    let Blocks { means, squares, row_len } = blocks;
    let (mut m, mut v) = (Chunk::new(), Chunk::new());
    let (mut at, mut block) = (0, 0);
    let (signed, unsigned) = (CodeMap::signed(), CodeMap::unsigned());
    while at < grads.len() {
        let len = BLOCK.min(row_len - at % row_len);
        means.load(signed, at, block, len, &mut m.0);
        squares.load(unsigned, at, block, len, &mut v.0);
        let end = at + len;
        let (w, t, g) = (&mut weights[at..end], &mut twins[at..end], &grads[at..end]);
        step_elements(w, t, g, &mut m.0[..len], &mut v.0[..len], with);
        m.0[len..].fill(0.0);
        v.0[len..].fill(0.0);
        means.store(signed, at, block, &m.0, len);
        squares.store(unsigned, at, block, &v.0, len);
        at += len;
        block += 1;
    }
}

/// The rule, in the order of PyTorch's operations. Returns the weight and the means.
#[inline(always)]
fn step(w: f32, g: f32, m: f32, v: f32, with: &Constants) -> (f32, f32, f32) {
    let g = g * with.grad_factor;
    let g = if with.l2 == 0.0 { g } else { g + with.l2 * w };
    let m = m + with.one_minus_beta1 * (g - m);
    let v = v * with.beta2 + with.one_minus_beta2 * g * g;
    let divisor = v.sqrt() / with.root_of_correction2 + with.eps;
    (w * with.kept - with.step_size * m / divisor, m, v)
}

#[cfg(test)]
mod tests;
