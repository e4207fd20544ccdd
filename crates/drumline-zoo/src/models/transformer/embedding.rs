//! Word embeddings: a table row, scaled, plus sinusoidal position encodings.

use std::borrow::Borrow;

use tch::nn::{Init, Path};
use tch::{Kind, Tensor, no_grad};

use crate::models::draw::drawn;
use crate::models::dropout::dropout;

/// An embedding table. The row of padding is initialised to zero and gets no gradient.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) weight: Tensor,
    pad: i64,
}

/// The size of the table, and the padding id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbeddingShape {
    pub(crate) vocab: i64,
    pub(crate) size: i64,
    pub(crate) pad: i64,
}

impl Embedding {
    /// Creates the table. Weights are normal with standard deviation `stdev`.
    pub(crate) fn new<'a>(path: impl Borrow<Path<'a>>, shape: EmbeddingShape, stdev: f64) -> Self {
        let path = path.borrow();
        let EmbeddingShape { vocab, size, pad } = shape;
        let weight = drawn(path, "weight", &[vocab, size], Init::Randn { mean: 0.0, stdev });
        let _ = no_grad(|| weight.get(pad).zero_());
        Self { weight, pad }
    }

    /// An embedding of a table that exists.
    pub(crate) fn of(weight: Tensor, pad: i64) -> Self {
        Self { weight, pad }
    }

    /// A second handle to the same table.
    pub(crate) fn shared(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), pad: self.pad }
    }

    /// The rows of tokens, unscaled.
    pub(crate) fn rows(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.weight, tokens, self.pad, false, false)
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
        let table = Embedding::new(store.root(), EmbeddingShape { vocab: 4, size: 3, pad: 2 }, 1.0);
        assert_eq!(table.weight.get(2).abs().sum(Kind::Float).double_value(&[]), 0.0);
        table.rows(&Tensor::from_slice(&[1i64, 2, 2])).sum(Kind::Float).backward();
        assert_eq!(
            table.weight.grad().sum_dim_intlist(1, false, Kind::Float),
            Tensor::from_slice(&[0f32, 3.0, 0.0, 0.0])
        );
    }
}
