//! The embeddings of tokens and places.

use drumline::engine::tensor::{Keeps, Variable};
use tch::Tensor;
use tch::nn::{Init, Path};

use super::{GptOptions, STDEV};
use crate::error::ZooError;
use crate::models::dropout::dropout;
use crate::models::ranks::ModelRanks;

#[derive(Debug)]
pub(super) struct GptEmbedding {
    /// Of tokens, also the weight of the head.
    pub(super) wte: Tensor,
    /// Of places.
    pub(super) wpe: Tensor,
}

impl GptEmbedding {
    /// Creates this rank's part under the path of the model.
    pub(super) fn new(ranks: &ModelRanks, path: &Path<'_>, options: &GptOptions) -> Result<Self, ZooError> {
        let wte = Self::of_tokens(ranks, &(path / "wte"), "weight", options)?;
        Self::with_tokens(wte, ranks, path, options)
    }

    /// The same with this embedding of tokens.
    pub(super) fn with_tokens(
        wte: Tensor,
        ranks: &ModelRanks,
        path: &Path<'_>,
        options: &GptOptions,
    ) -> Result<Self, ZooError> {
        let size = &[options.n_positions, options.n_embd];
        let places = Variable { name: "weight", size, keeps: Keeps::Whole };
        Ok(Self { wte, wpe: ranks.drawn(&(path / "wpe"), places, init())? })
    }

    /// The embedding of tokens, at `path` with this name.
    pub(super) fn of_tokens(
        ranks: &ModelRanks,
        path: &Path<'_>,
        name: &str,
        options: &GptOptions,
    ) -> Result<Tensor, ZooError> {
        let size = &[options.padded_vocab(), options.n_embd];
        ranks.drawn(path, Variable { name, size, keeps: Keeps::Along(0) }, init())
    }

    /// The embedded tokens, of which the first is at place `first`.
    pub(super) fn forward(&self, tokens: &Tensor, first: i64, p: f64) -> Tensor {
        let places = self.wpe.narrow(0, first, tokens.size()[1]);
        // A module cannot return an error; libtorch's own methods would panic too.
        let words = drumline_torch::embedding(&self.wte, tokens).unwrap_or_else(|error| panic!("{error}"));
        dropout(&(words + places), p)
    }
}

fn init() -> Init {
    Init::Randn { mean: 0.0, stdev: STDEV }
}
