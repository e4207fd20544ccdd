//! A stack of layers: the encoder, and the decoder.

use tch::Tensor;
use tch::nn::Path;

use super::attention::{KeysValues, Mask, padding_mask};
use super::layer::{DecoderLayer, EncoderLayer, LayerShape, NormPlace, Source};
use super::linear::LayerNorm;

/// Source sentences as the decoder sees them.
#[derive(Debug)]
pub struct Memory {
    /// batch × places × `d_model`.
    pub states: Tensor,
    /// What is added to the attention to each place: 0, or minus infinity where there is padding; batch × 1 × 1 × places.
    pub mask: Tensor,
}

/// A stack of encoder layers.
#[derive(Debug)]
pub(crate) struct Encoder {
    layers: Vec<EncoderLayer>,
    norm: Option<LayerNorm>,
}

impl Encoder {
    pub(crate) fn new(path: &Path<'_>, n_layers: i64, shape: &LayerShape) -> Self {
        let layers = (0..n_layers).map(|place| EncoderLayer::new(&(path / "layers" / place), shape));
        Self { layers: layers.collect(), norm: last_norm(path, shape) }
    }

    /// `xs` are the vectors of `tokens`, of which `pad` is hidden.
    pub(crate) fn forward(&self, xs: Tensor, tokens: &Tensor, pad: i64, p: f64) -> Memory {
        let mask = padding_mask(tokens, pad, xs.kind());
        let through = |xs: Tensor, layer: &EncoderLayer| layer.forward(&xs, Mask::Added(&mask), p);
        let states = ended(self.layers.iter().fold(xs, through), &self.norm);
        Memory { states, mask }
    }
}

/// A stack of decoder layers.
#[derive(Debug)]
pub(crate) struct DecoderStack {
    layers: Vec<DecoderLayer>,
    norm: Option<LayerNorm>,
}

impl DecoderStack {
    pub(crate) fn new(path: &Path<'_>, n_layers: i64, shape: &LayerShape) -> Self {
        let layers = (0..n_layers).map(|place| DecoderLayer::new(&(path / "layers" / place), shape));
        Self { layers: layers.collect(), norm: last_norm(path, shape) }
    }

    pub(crate) fn forward(&self, mut xs: Tensor, memory: &Memory, p: f64) -> Tensor {
        for layer in &self.layers {
            let kept = layer.multihead_attn.keys_values(&memory.states);
            xs = layer.forward(&xs, Source { kept: &kept, mask: &memory.mask }, p);
        }
        ended(xs, &self.norm)
    }

    /// Keys and values of the source, for each layer.
    pub(crate) fn keys_values(&self, memory: &Memory) -> Vec<KeysValues> {
        self.layers.iter().map(|layer| layer.multihead_attn.keys_values(&memory.states)).collect()
    }

    /// The next place of each row, as [`DecoderLayer::next`]; `past` is told the layer.
    pub(crate) fn next(
        &self,
        mut xs: Tensor,
        sources: &[KeysValues],
        mask: &Tensor,
        mut past: impl FnMut(usize, KeysValues) -> KeysValues,
    ) -> Tensor {
        for (place, (layer, kept)) in self.layers.iter().zip(sources).enumerate() {
            xs = layer.next(&xs, Source { kept, mask }, |new| past(place, new));
        }
        ended(xs, &self.norm)
    }
}

fn last_norm(path: &Path<'_>, shape: &LayerShape) -> Option<LayerNorm> {
    (shape.norm == NormPlace::Before).then(|| LayerNorm::new(path / "norm", shape.d_model))
}

fn ended(xs: Tensor, norm: &Option<LayerNorm>) -> Tensor {
    match norm {
        Some(norm) => norm.forward(&xs),
        None => xs,
    }
}
