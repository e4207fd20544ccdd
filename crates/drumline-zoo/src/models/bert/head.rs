//! The head that predicts masked words: a dense layer, and the embedding of words again.

use drumline::engine::ParallelError;
use drumline::engine::tensor::{Keeps, Variable};
use tch::Tensor;
use tch::nn::Path;

use super::{BertOptions, EPS, init};
use crate::error::ZooError;
use crate::models::logits::{Logits, OutputLayer};
use crate::models::ranks::ModelRanks;
use crate::models::transformer::{Embedding, LayerNorm, Linear};

#[derive(Debug)]
pub(super) struct MaskedHead {
    transform: Linear,
    norm: LayerNorm,
    /// Its weight is the embedding of words.
    decoder: OutputLayer,
}

impl MaskedHead {
    /// Creates this rank's part of the head under the path of the model.
    pub(super) fn new(
        ranks: &ModelRanks,
        words: &Embedding,
        path: &Path<'_>,
        options: &BertOptions,
    ) -> Result<Self, ZooError> {
        let (path, size) = (path / "cls" / "predictions", options.hidden_size as i64);
        let (transform, classes) = (&path / "transform", words.classes());
        let bias = Variable { name: "bias", size: &[classes.count], keeps: Keeps::Along(0) };
        Ok(Self {
            transform: Linear::with_init(&transform / "dense", size, size, init()),
            norm: LayerNorm::with_eps(&transform / "LayerNorm", size, EPS),
            decoder: OutputLayer {
                weight: words.weight.shallow_clone(),
                bias: Some(ranks.zeros(&path, bias)?),
                classes,
            },
        })
    }

    /// The logits of states, whose last dimension is `hidden_size`.
    pub(super) fn forward(&self, states: &Tensor) -> Result<Logits, ParallelError> {
        self.decoder.forward(&self.norm.forward(&self.transform.forward(states).gelu("none")))
    }
}
