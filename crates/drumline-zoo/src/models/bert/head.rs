//! The head that predicts masked words: a dense layer, and the embedding of words again.

use drumline_torch::linear;
use tch::Tensor;
use tch::nn::Path;

use super::{BertOptions, EPS, init};
use crate::models::transformer::{LayerNorm, Linear};

#[derive(Debug)]
pub(super) struct MaskedHead {
    transform: Linear,
    norm: LayerNorm,
    /// The embedding of words.
    words: Tensor,
    bias: Tensor,
}

impl MaskedHead {
    /// Creates the head under the path of the model.
    pub(super) fn new(words: &Tensor, path: &Path<'_>, options: &BertOptions) -> Self {
        let (path, size) = (path / "cls" / "predictions", options.hidden_size as i64);
        let transform = &path / "transform";
        Self {
            transform: Linear::with_init(&transform / "dense", size, size, init()),
            norm: LayerNorm::with_eps(&transform / "LayerNorm", size, EPS),
            words: words.shallow_clone(),
            bias: path.zeros("bias", &words.size()[..1]),
        }
    }

    /// The logits of states, whose last dimension is `hidden_size`.
    pub(super) fn forward(&self, states: &Tensor) -> Tensor {
        let transformed = self.norm.forward(&self.transform.forward(states).gelu("none"));
        // A module cannot return an error; libtorch's own methods would panic too.
        linear(&transformed, &self.words, Some(&self.bias)).unwrap_or_else(|error| panic!("{error}"))
    }
}
