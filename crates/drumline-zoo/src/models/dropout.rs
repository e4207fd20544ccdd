//! Dropout. Errors of libtorch are panics, as in tch's own modules.

use tch::Tensor;

/// Why these functions cannot fail.
const FITS: &str = "the probability was checked with the options, and shapes are the model's";

/// Zeroes elements with probability `p` and scales the others so that the mean stays the same. With 0 it does nothing.
pub(super) fn dropout(xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::dropout(xs, p).expect(FITS)
}

/// ReLU, then dropout.
pub(super) fn relu_dropout(xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::relu_dropout(xs, p).expect(FITS)
}

/// `base` plus `xs` after dropout.
pub(super) fn sum_with_dropout(base: &Tensor, xs: &Tensor, p: f64) -> Tensor {
    drumline_torch::sum_with_dropout(base, xs, p).expect(FITS)
}
