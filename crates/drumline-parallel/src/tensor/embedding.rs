//! An embedding of which each rank has some of the rows, and the positions of a text beside it.
//!
//! ```text
//!   vocabulary of 10 on 2 ranks   rank 0: rows 0 to 4    tokens 3 7 ─▶ row 3, zeros ─┐ Partial
//!                                 rank 1: rows 5 to 9                  zeros, row 7 ─┘
//! ```

use tch::nn::{Init, Path};
use tch::{Kind, Tensor};

use super::ranks::TensorParallel;
use super::value::{Features, Partial, Replicated, Sharded, TpTensor};
use super::variable::{Keeps, Variable};
use super::within::Within;
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// An embedding whose vocabulary is cut, which may also be the weight of the logits.
#[derive(Debug)]
pub struct VocabEmbedding {
    weight: Tensor,
    vocab: i64,
    padding_idx: Option<i64>,
    tp: TensorParallel,
}

impl VocabEmbedding {
    /// Creates this rank's rows of the table, which has `size` features for each token.
    pub fn new(tp: &TensorParallel, path: &Path<'_>, [vocab, size]: [i64; 2], init: Init) -> Result<Self> {
        let weight = Variable { name: "weight", size: &[vocab, size], keeps: Keeps::Along(0) };
        Ok(Self::of(&tp.variable(path, weight, init)?, vocab, tp))
    }

    /// The table of which `weight` has this rank's rows, of `vocab`.
    pub fn of(weight: &Tensor, vocab: i64, tp: &TensorParallel) -> Self {
        Self { weight: weight.shallow_clone(), vocab, padding_idx: None, tp: tp.clone() }
    }

    /// The same, but reading the row of this token gives it no gradient: PyTorch's `padding_idx`.
    #[must_use]
    pub fn with_padding_idx(self, token: i64) -> Self {
        Self { padding_idx: Some(token), ..self }
    }

    /// The rows of tokens, which all ranks have. A token that another rank has contributes zeros here.
    pub fn forward(&self, tokens: &Tensor) -> Result<TpTensor<Partial>> {
        // No rank has the row of such a token, which would be zeros, silently.
        let advice = "; try texts of the vocabulary that the model was made for";
        Within { what: "a token", len: self.vocab, advice }.check(tokens, None)?;
        Ok(TpTensor::partial(self.rows_of(tokens)?, &self.tp))
    }

    /// Logits by the same table: the products of states with its rows, which are the classes.
    pub fn logits(&self, states: &TpTensor<Replicated>) -> Result<TpTensor<Sharded<Features>>> {
        let own = states.local.f_linear::<&Tensor>(&self.weight, None)?;
        TpTensor::sharded(own, self.vocab, &self.tp)
    }

    /// The rows of this rank's tokens, and zeros for all others.
    fn rows_of(&self, tokens: &Tensor) -> Result<Tensor> {
        let (Self { weight, padding_idx, .. }, range) = (self, self.tp.cut(self.vocab).range(self.tp.rank()));
        let own = tokens.f_ge(range.start)?.f_logical_and(&tokens.f_lt(range.end)?)?;
        if range.is_empty() {
            // A rank without rows has no row to read.
            let size = [&tokens.size()[..], &weight.size()[1..]].concat();
            let zeros = Tensor::f_zeros(&size[..], (weight.kind(), weight.device()))?;
            return Ok(zeros.f_add(&weight.f_sum(weight.kind())?)?);
        }
        let within = tokens.f_sub_scalar(range.start)?.f_mul(&own.f_to_kind(Kind::Int64)?)?;
        // Tokens of other ranks read the first row. They give it zeros as gradients.
        let padding =
            padding_idx.filter(|token| range.contains(token)).map_or(-1, |token| token - range.start);
        let rows = Tensor::f_embedding(weight, &within, padding, false, false)?;
        Ok(rows.f_mul(&own.f_unsqueeze(-1)?.f_to_kind(weight.kind())?)?)
    }
}
