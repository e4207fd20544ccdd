//! Words as vectors: a row of a table, scaled, plus the sine and cosine waves that tell places apart.

use tch::nn::{Init, Path};
use tch::{Kind, Tensor, no_grad};

use crate::models::dropout::dropout;

/// A table of vectors; that of padding begins at zero and is not learnt from the input.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) weight: Tensor,
    pad: i64,
}

/// How large, and which of them is padding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbeddingShape {
    pub(crate) vocab: i64,
    pub(crate) size: i64,
    pub(crate) pad: i64,
}

impl Embedding {
    /// The numbers begin with a deviation of `stdev`.
    pub(crate) fn new(path: Path<'_>, shape: EmbeddingShape, stdev: f64) -> Self {
        let EmbeddingShape { vocab, size, pad } = shape;
        let weight = path.var("weight", &[vocab, size], Init::Randn { mean: 0.0, stdev });
        let _ = no_grad(|| weight.get(pad).zero_());
        Self { weight, pad }
    }

    /// The same table for another use.
    pub(crate) fn shared(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), pad: self.pad }
    }

    /// Plain rows of the table.
    pub(crate) fn rows(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.weight, tokens, self.pad, false, false)
    }

    /// Rows times √size plus the waves of their places, of which `first` is the first; `tokens` are batch × places.
    pub(crate) fn placed(&self, tokens: &Tensor, first: i64, p: f64) -> Tensor {
        let rows = self.rows(tokens);
        let size = rows.size();
        let waves = waves(first, size[1], &rows);
        dropout(&(rows * (size[2] as f64).sqrt() + waves), p)
    }
}

/// Place × size: sines at even elements, cosines at odd ones, with wave lengths from 2π to 20000π.
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
    fn waves_are_as_in_the_paper_and_go_on_from_any_place() {
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
