//! Adafactor on slices of host memory, in three passes over gradients and two over weights: its step depends on sums
//! over rows, over columns and over all elements.
//!
//! ```text
//!   1  gradients, weights ─▶ means of g² by row and by column (or of each element) │ Σ w²
//!   2  gradients ─▶ u = g ÷ √(row × column ÷ mean of rows) ─▶ Σ u²
//!   3  gradients, weights ─▶ w·kept − factor·u
//! ```
//! Matrices are the last two dims of a tensor. Sums are in f64.

use super::floats::for_instruction_sets;
use super::weights::{CHUNK, Chunk, Elements, GradSlices, sum_of_squares};

/// The estimate of the mean squared gradient of each element.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Variance<'a> {
    /// Of each element itself.
    Elements(&'a [f32]),
    /// Of the rows and the columns of matrices, with the mean of the rows of each matrix.
    Factored { shape: Matrices, rows: &'a [f32], columns: &'a [f32], means_of_rows: &'a [f32] },
}

/// Matrices of one shape, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Matrices {
    pub(crate) num_rows: usize,
    pub(crate) row_len: usize,
}

/// How a running mean moves, and the least variance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdafactorStep {
    /// How far a running mean moves towards the new value, from 0 to 1.
    pub(crate) weight: f32,
    /// The least variance of an element.
    pub(crate) least: f32,
    /// Gradients are multiplied by it.
    pub(crate) grad_factor: f32,
}

/// The change of weights, beside its direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    /// Weights are multiplied by it first.
    pub(crate) kept: f32,
    /// Directions are multiplied by it.
    pub(crate) factor: f32,
}

/// A number between `from` and `to`, as `torch.lerp` computes it.
#[inline(always)]
pub(crate) fn lerp(from: f32, to: f32, weight: f32) -> f32 {
    if weight < 0.5 { from + weight * (to - from) } else { to - (to - from) * (1.0 - weight) }
}

for_instruction_sets! {
    /// Updates the running means of some rows, and adds the squares of each column to `columns`. Returns the sum of
    /// squared weights.
    pub(crate) fn row_means(
        elements: &Elements<'_>,
        shape: Matrices,
        rows: &mut [f32],
        columns: &mut [f64],
        with: AdafactorStep,
    ) -> f64 {
        let Matrices { num_rows, row_len } = shape;
        let (mut w, mut g, mut sum_of_weights) = (Chunk::new(), Chunk::new(), 0.0);
        for (row, mean) in rows.iter_mut().enumerate() {
            let (mut sum, first) = (0.0, row / num_rows * row_len);
            for (nth, columns) in columns[first..first + row_len].chunks_mut(CHUNK).enumerate() {
                let at = row * row_len + nth * CHUNK;
                let (w, g) = (&mut w.0[..columns.len()], &mut g.0[..columns.len()]);
                elements.weights.load(at, w);
                elements.grads.load(at, g, with.grad_factor);
                sum_of_weights += sum_of_squares(w);
                sum += sum_of_squares(g);
                for (column, g) in columns.iter_mut().zip(g.iter()) {
                    *column += f64::from(*g) * f64::from(*g);
                }
            }
            *mean = lerp(*mean, (sum / row_len as f64) as f32, with.weight);
        }
        sum_of_weights
    }
}

for_instruction_sets! {
    /// Updates the running mean of each element. Returns the sum of squared weights.
    pub(crate) fn element_means(elements: &Elements<'_>, means: &mut [f32], with: AdafactorStep) -> f64 {
        let (mut w, mut g, mut sum_of_weights) = (Chunk::new(), Chunk::new(), 0.0);
        for (nth, means) in means.chunks_mut(CHUNK).enumerate() {
            let (at, w, g) = (nth * CHUNK, &mut w.0[..means.len()], &mut g.0[..means.len()]);
            elements.weights.load(at, w);
            elements.grads.load(at, g, with.grad_factor);
            sum_of_weights += sum_of_squares(w);
            for (mean, g) in means.iter_mut().zip(g.iter()) {
                *mean = lerp(*mean, g * g, with.weight);
            }
        }
        sum_of_weights
    }
}

/// Elements that are adjacent, and in one row if the variance is factored: where they begin, and how many there are.
#[inline(always)]
fn next_chunk(variance: &Variance<'_>, at: usize, num: usize) -> usize {
    let in_row = match variance {
        Variance::Elements(_) => num - at,
        Variance::Factored { shape, .. } => shape.row_len - at % shape.row_len,
    };
    in_row.min(CHUNK).min(num - at)
}

/// Turns gradients from `at` on into directions.
#[inline(always)]
fn directions(variance: &Variance<'_>, at: usize, g: &mut [f32], least: f32) {
    match variance {
        Variance::Elements(means) => {
            for (g, mean) in g.iter_mut().zip(&means[at..]) {
                *g /= mean.max(least).sqrt();
            }
        }
        Variance::Factored { shape: Matrices { num_rows, row_len }, rows, columns, means_of_rows } => {
            let (row, column) = (at / row_len, at % row_len);
            let (matrix, row) = (row / num_rows, rows[row]);
            let mean = means_of_rows[matrix];
            for (g, column) in g.iter_mut().zip(&columns[matrix * row_len + column..]) {
                *g /= (row * column / mean).max(least).sqrt();
            }
        }
    }
}

for_instruction_sets! {
    /// The sum of squared directions.
    pub(crate) fn squared_directions(grads: &GradSlices<'_>, variance: &Variance<'_>, with: AdafactorStep) -> f64 {
        let (mut g, mut sum, mut at, num) = (Chunk::new(), 0.0, 0, grads.len());
        while at < num {
            let len = next_chunk(variance, at, num);
            let g = &mut g.0[..len];
            grads.load(at, g, with.grad_factor);
            directions(variance, at, g, with.least);
            sum += sum_of_squares(g);
            at += len;
        }
        sum
    }
}

for_instruction_sets! {
    /// Changes the weights.
    pub(crate) fn change_weights(
        elements: &mut Elements<'_>,
        variance: &Variance<'_>,
        with: AdafactorStep,
        change: Change,
    ) {
        let (mut w, mut g, mut at, num) = (Chunk::new(), Chunk::new(), 0, elements.len());
        let Elements { weights, grads } = elements;
        while at < num {
            let len = next_chunk(variance, at, num);
            let (w, g) = (&mut w.0[..len], &mut g.0[..len]);
            weights.load(at, w);
            grads.load(at, g, with.grad_factor);
            directions(variance, at, g, with.least);
            for (w, g) in w.iter_mut().zip(g.iter()) {
                *w = *w * change.kept - change.factor * g;
            }
            weights.store(at, w);
            at += len;
        }
    }
}
