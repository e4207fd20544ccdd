//! Word embeddings: a table row, scaled, plus sinusoidal position encodings.

use std::borrow::Borrow;

use drumline::engine::tensor::{Keeps, TensorParallel, Variable, VocabEmbedding};
use tch::nn::{Init, Path};
use tch::{Kind, Tensor, no_grad};

use super::linear::ok;
use crate::error::ZooError;
use crate::models::dropout::dropout;
use crate::models::logits::Classes;
use crate::models::ranks::ModelRanks;

/// An embedding table. The row of padding is initialised to zero and gets no gradient. Ranks along `tp` have parts of it, by
/// words.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// This rank's rows.
    pub(crate) weight: Tensor,
    shape: EmbeddingShape,
    tp: TensorParallel,
}

/// The size of the table, and the padding id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbeddingShape {
    pub(crate) vocab: i64,
    pub(crate) size: i64,
    pub(crate) pad: i64,
}

impl Embedding {
    /// Creates this rank's part of the table. Weights are normal with standard deviation `stdev`.
    pub(crate) fn new<'a>(
        ranks: &ModelRanks,
        path: impl Borrow<Path<'a>>,
        shape: EmbeddingShape,
        stdev: f64,
    ) -> Result<Self, ZooError> {
        let EmbeddingShape { vocab, size, pad } = shape;
        let table = Variable { name: "weight", size: &[vocab, size], keeps: Keeps::Along(0) };
        let weight = ranks.drawn(path.borrow(), table, Init::Randn { mean: 0.0, stdev })?;
        let own = ranks.tp.cut(vocab).range(ranks.tp.rank());
        if own.contains(&pad) {
            let _ = no_grad(|| weight.get(pad - own.start).zero_());
        }
        Ok(Self::of(ranks, weight, shape))
    }

    /// An embedding of a table of which this rank has these rows.
    pub(crate) fn of(ranks: &ModelRanks, weight: Tensor, shape: EmbeddingShape) -> Self {
        Self { weight, shape, tp: ranks.tp.clone() }
    }

    /// A second handle to the same table.
    pub(crate) fn shared(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), shape: self.shape, tp: self.tp.clone() }
    }

    /// The words as classes.
    pub(crate) fn classes(&self) -> Classes {
        Classes { count: self.shape.vocab, tp: self.tp.clone() }
    }

    /// The rows of tokens, unscaled.
    pub(crate) fn rows(&self, tokens: &Tensor) -> Tensor {
        let EmbeddingShape { vocab, pad, .. } = self.shape;
        if !self.tp.is_cut() {
            return Tensor::embedding(&self.weight, tokens, pad, false, false);
        }
        let own = VocabEmbedding::of(&self.weight, vocab, &self.tp).with_padding_idx(pad);
        ok(own.forward(tokens).and_then(|rows| rows.sum())).into_tensor()
    }

    /// Rows times √size, plus the position encodings from place `first` on. `tokens` is `[batch, places]`.
    pub(crate) fn placed(&self, tokens: &Tensor, first: i64, p: f64) -> Tensor {
        let rows = self.rows(tokens);
        let size = rows.size();
        let waves = waves(first, size[1], &rows);
        dropout(&(rows * (size[2] as f64).sqrt() + waves), p)
    }
}

/// The position encodings `[places, size]`: sines at even elements, cosines at odd ones, with wavelengths from 2π to
/// 20000π.
fn waves(first: i64, places: i64, like: &Tensor) -> Tensor {
    let size = like.size()[2];
    let options = (Kind::Float, like.device());
    let pairs = Tensor::arange((size + 1) / 2, options);
    let speeds = (pairs * (-2.0 / size as f64 * 1e4f64.ln())).exp();
    let angles = Tensor::arange_start(first, first + places, options).unsqueeze(1) * speeds;
    let waves = Tensor::stack(&[angles.sin(), angles.cos()], 2).flatten(1, 2);
    waves.narrow(1, 0, size).to_kind(like.kind())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;
    use tch::nn::VarStore;

    #[test]
    fn position_encodings_match_the_paper_from_any_place() {
        let like = Tensor::zeros([1, 1, 5], (Kind::Float, Device::Cpu));
        let all = waves(0, 40, &like);
        for (place, element) in [(0i64, 0i64), (0, 1), (7, 2), (39, 3), (39, 4)] {
            let angle = place as f64 / 1e4f64.powf((element / 2 * 2) as f64 / 5.0);
            let expected = if element % 2 == 0 { angle.sin() } else { angle.cos() };
            assert!((all.double_value(&[place, element]) - expected).abs() < 1e-5, "{place} {element}");
        }
        assert_eq!(waves(11, 3, &like), all.narrow(0, 11, 3));
    }

    #[test]
    fn padding_is_zero_and_has_no_gradient() {
        let store = VarStore::new(Device::Cpu);
        let shape = EmbeddingShape { vocab: 4, size: 3, pad: 2 };
        let table = Embedding::new(&ModelRanks::default(), store.root(), shape, 1.0).unwrap();
        assert_eq!(table.weight.get(2).abs().sum(Kind::Float).double_value(&[]), 0.0);
        table.rows(&Tensor::from_slice(&[1i64, 2, 2])).sum(Kind::Float).backward();
        assert_eq!(
            table.weight.grad().sum_dim_intlist(1, false, Kind::Float),
            Tensor::from_slice(&[0f32, 3.0, 0.0, 0.0])
        );
    }
}
