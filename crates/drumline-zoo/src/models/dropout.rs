//! Dropout, with the errors of tensors that do not fit as panics, as tch has them.

use tch::Tensor;

/// Why it cannot fail.
const FITS: &str = "the probability was checked with the options, and shapes are the model's";

/// Elements are zeroed with probability `p`, the others scaled so that the mean stays; with 0 nothing is done.
pub(super) fn dropout(xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::dropout(xs, p).expect(FITS)
}

/// The same of the positive part.
pub(super) fn relu_dropout(xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::relu_dropout(xs, p).expect(FITS)
}

/// `base` plus `xs` with dropout.
pub(super) fn sum_with_dropout(base: &Tensor, xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::sum_with_dropout(base, xs, p).expect(FITS)
}
