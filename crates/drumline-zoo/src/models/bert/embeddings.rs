//! The embeddings of words, places and types, with a norm.

use std::borrow::Borrow;

use tch::Tensor;
use tch::nn::Path;

use super::{BertOptions, EPS, NUM_TYPES, PAD, STDEV, init};
use crate::error::ZooError;
use crate::models::draw::drawn;
use crate::models::dropout::dropout;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::{Embedding, EmbeddingShape, LayerNorm};

#[derive(Debug)]
pub(super) struct Embeddings {
    pub(super) words: Embedding,
    places: Tensor,
    types: Tensor,
    norm: LayerNorm,
}

impl Embeddings {
    /// The shape of the embedding of words.
    pub(super) fn table(options: &BertOptions, vocab: i64) -> EmbeddingShape {
        EmbeddingShape { vocab, size: options.hidden_size as i64, pad: PAD }
    }

    /// This rank's part of the embedding of words, which is also the weight of the head.
    pub(super) fn words<'a>(
        ranks: &ModelRanks,
        path: impl Borrow<Path<'a>>,
        options: &BertOptions,
        vocab_size: i64,
    ) -> Result<Embedding, ZooError> {
        Embedding::new(ranks, path, Self::table(options, vocab_size), STDEV)
    }

    /// Creates the others beside that of words, under the path of the model.
    pub(super) fn new(words: Embedding, path: &Path<'_>, options: &BertOptions) -> Self {
        let (path, size) = (path / "bert" / "embeddings", options.hidden_size as i64);
        let table = |name: &str, rows| drawn(&path / name, "weight", &[rows, size], init());
        Self {
            words,
            places: table("position_embeddings", options.max_position_embeddings as i64),
            types: table("token_type_embeddings", NUM_TYPES),
            norm: LayerNorm::with_eps(&path / "LayerNorm", size, EPS),
        }
    }

    /// The embedded tokens `[texts, places, hidden_size]`.
    pub(super) fn forward(&self, tokens: &Tensor, types: &Tensor, p: f64) -> Tensor {
        let places = self.places.narrow(0, 0, tokens.size()[1]);
        let types = Tensor::embedding(&self.types, types, -1, false, false);
        dropout(&self.norm.forward(&(self.words.rows(tokens) + types + places)), p)
    }
}
