//! Stacks of layers: the encoder and the decoder.

use drumline_torch::{MaskScope, mask_layer};
use tch::Tensor;
use tch::nn::Path;

use super::attention::{KeysValues, Mask, Source, Sources, hidden, padding_mask};
use super::layer::{DecoderLayer, EncoderLayer, LayerShape, NormPlace};
use super::linear::LayerNorm;
use super::rows::Rows;
use crate::error::ZooError;
use crate::models::checkpointing::{Blocks, Checkpointing, OneBlock};
use crate::models::ranks::ModelRanks;

/// The layers of a stack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StackShape {
    pub(crate) n_layers: i64,
    pub(crate) layer: LayerShape,
    pub(crate) checkpoint: Checkpointing,
}

/// Encoded source sentences for the decoder.
#[derive(Debug)]
pub struct Memory {
    /// The states `[batch, places, d_model]`; those at padding have no meaning.
    pub states: Tensor,
    /// The attention mask `[batch, 1, 1, places]`: 0, or -∞ at padding.
    pub mask: Tensor,
}

/// Encoded source sentences without padding.
#[derive(Debug)]
pub(crate) struct Encoded {
    /// The states `[rows, d_model]`.
    states: Tensor,
    rows: Rows,
    mask: Tensor,
}

impl Encoded {
    /// Embedded `tokens` `[batch, places, d_model]`, of which `pad` is hidden.
    pub(crate) fn embedded(xs: &Tensor, tokens: &Tensor, pad: i64) -> Self {
        let hidden = hidden(tokens, pad);
        let rows = Rows::seen(&hidden);
        Self { states: rows.pack(xs), rows, mask: padding_mask(&hidden, xs.kind()) }
    }

    /// The rows of the same tokens.
    pub(crate) fn of_rows(states: Tensor, tokens: &Tensor, pad: i64) -> Self {
        let hidden = hidden(tokens, pad);
        let mask = padding_mask(&hidden, states.kind());
        Self { states, rows: Rows::seen(&hidden), mask }
    }

    /// The states `[rows, d_model]`.
    pub(crate) fn states(&self) -> &Tensor {
        &self.states
    }

    /// The same after an encoder layer.
    pub(crate) fn through(self, layer: &OneBlock<EncoderLayer>, p: f64) -> Self {
        let (rows, mask) = (self.rows.shared(), self.mask.shallow_clone());
        let forward =
            move |layer: &EncoderLayer, xs: &[Tensor]| layer.forward(&xs[0], &rows, Mask::Added(&mask), p);
        Self { states: layer.forward(&[&self.states], forward), ..self }
    }

    /// The same after the norm at the end of a stack, if it has one.
    pub(crate) fn ended(self, norm: Option<&LayerNorm>) -> Self {
        Self { states: ended(self.states, norm), ..self }
    }

    pub(crate) fn into_memory(self) -> Memory {
        Memory { states: self.rows.unpack(&self.states), mask: self.mask }
    }
}

/// A stack of encoder layers.
#[derive(Debug)]
pub(crate) struct Encoder {
    layers: Blocks<EncoderLayer>,
    norm: Option<LayerNorm>,
}

impl Encoder {
    pub(crate) fn new(ranks: &ModelRanks, path: &Path<'_>, stack: StackShape) -> Result<Self, ZooError> {
        let StackShape { n_layers, layer, checkpoint } = stack;
        let layers = (0..n_layers).map(|place| EncoderLayer::new(ranks, &(path / "layers" / place), &layer));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { layers: Blocks::new(layers, checkpoint)?, norm: last_norm(path, &layer) })
    }

    /// `xs` are the embedded `tokens`, of which `pad` is hidden.
    pub(crate) fn forward(&self, xs: &Tensor, tokens: &Tensor, pad: i64, p: f64) -> Encoded {
        let _masks = encoder_masks();
        let embedded = Encoded::embedded(xs, tokens, pad);
        let through = |xs: Encoded, layer: &OneBlock<EncoderLayer>| xs.through(layer, p);
        self.layers.each().iter().fold(embedded, through).ended(self.norm.as_ref())
    }
}

/// A stack of decoder layers.
#[derive(Debug)]
pub(crate) struct DecoderStack {
    layers: Blocks<DecoderLayer>,
    norm: Option<LayerNorm>,
}

impl DecoderStack {
    pub(crate) fn new(ranks: &ModelRanks, path: &Path<'_>, stack: StackShape) -> Result<Self, ZooError> {
        let StackShape { n_layers, layer, checkpoint } = stack;
        let layers = (0..n_layers).map(|place| DecoderLayer::new(ranks, &(path / "layers" / place), &layer));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        Ok(Self { layers: Blocks::new(layers, checkpoint)?, norm: last_norm(path, &layer) })
    }

    /// `xs` is `[rows, size]`.
    pub(crate) fn forward(&self, xs: Tensor, rows: &Rows, source: &Encoded, p: f64) -> Tensor {
        let _masks = decoder_masks();
        let through = |xs: Tensor, layer: &OneBlock<DecoderLayer>| decoded(layer, &xs, rows, source, p);
        ended(self.layers.each().iter().fold(xs, through), self.norm.as_ref())
    }

    /// The source keys and values for each layer.
    pub(crate) fn keys_values(&self, memory: &Memory) -> Vec<KeysValues> {
        let (states, size) = (memory.states.flatten(0, 1), memory.states.size());
        let rows = Rows::all(size[0], size[1]);
        self.layers.iter().map(|layer| layer.multihead_attn.keys_values(&states, &rows)).collect()
    }

    /// Computes the next place of each row, like [`DecoderLayer::next`]. `past` also gets the layer's index.
    pub(crate) fn next(
        &self,
        mut xs: Tensor,
        Sources { kept, mask }: Sources<'_>,
        mut past: impl FnMut(usize, KeysValues) -> KeysValues,
    ) -> Tensor {
        for (place, (layer, kept)) in self.layers.iter().zip(kept).enumerate() {
            xs = layer.next(&xs, Source { kept, mask }, |new| past(place, new));
        }
        ended(xs, self.norm.as_ref())
    }
}

/// Dropout is that of the encoder's layers, until the result is dropped.
pub(super) fn encoder_masks() -> MaskScope {
    mask_layer("encoder", 0)
}

/// The same of the decoder's.
pub(super) fn decoder_masks() -> MaskScope {
    mask_layer("decoder", 0)
}

/// The rows after a decoder layer.
pub(super) fn decoded(
    layer: &OneBlock<DecoderLayer>,
    xs: &Tensor,
    rows: &Rows,
    source: &Encoded,
    p: f64,
) -> Tensor {
    let (rows, source_rows) = (rows.shared(), source.rows.shared());
    let mask = source.mask.shallow_clone();
    layer.forward(&[xs, &source.states], move |layer, inputs| {
        let kept = layer.multihead_attn.keys_values(&inputs[1], &source_rows);
        layer.forward(&inputs[0], &rows, Source { kept: &kept, mask: &mask }, p)
    })
}

/// The norm at the end of a stack, if it has one.
pub(super) fn last_norm(path: &Path<'_>, shape: &LayerShape) -> Option<LayerNorm> {
    (shape.norm == NormPlace::Before).then(|| LayerNorm::new(path / "norm", shape.d_model))
}

pub(super) fn ended(xs: Tensor, norm: Option<&LayerNorm>) -> Tensor {
    match norm {
        Some(norm) => norm.forward(&xs),
        None => xs,
    }
}
