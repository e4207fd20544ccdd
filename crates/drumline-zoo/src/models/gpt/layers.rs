//! A GPT as a list of layers, for pipelines.
//!
//! ```text
//!   tokens, targets ─▶ embed ─▶ states, targets ─▶ h.0 ─▶ … ─▶ h.(n - 1) ─▶ states, targets ─▶ head ─▶ sum of losses
//! ```
//! Layers compute what [`Gpt`](super::Gpt) computes, of the same variables. Targets travel with the states, so that the last
//! layer computes the loss; so does the length of the texts, of which ranks along `cp` and `tp` have parts.

use drumline::engine::pipeline::{Boundary, Layer, LayerBuilder, LayerError, LayerList, LayerSpec, Mode};
use tch::Tensor;

use super::GptOptions;
use super::block::{Block, Residual};
use super::cut::Pass;
use super::embedding::GptEmbedding;
use super::head::Head;
use crate::error::ZooError;
use crate::models::checkpointing::OneBlock;
use crate::models::net::tensors_of;
use crate::models::ranks::ModelRanks;
use crate::models::transformer::LayerNorm;

/// The variable of the first and of the last layer.
const WTE: &str = "wte.weight";

/// The model as a list of layers, of which a rank has all or its part. The first layer gets tokens and targets, both `[texts,
/// places]`; the last one returns the sum of the losses.
pub fn layers(ranks: &ModelRanks, options: &GptOptions) -> Result<LayerList, ZooError> {
    options.check_on(ranks)?;
    let GptOptions { n_layer, n_embd, n_positions, .. } = *options;
    options.checkpoint.check(n_layer as usize)?;
    let model = Shared { ranks: ranks.clone(), options: options.clone() };
    let mut list = LayerList::default();
    let first = model.clone();
    // Costs are products for each token.
    list.push(LayerSpec::new("embed", move |layer| first.first(layer)).cost(n_embd as f64).names_masks());
    for index in 0..n_layer {
        let block = model.clone();
        let cost = n_embd * (12 * n_embd + n_positions);
        let spec = LayerSpec::new(format!("h.{index}"), move |layer| block.middle(layer, index as usize));
        list.push(spec.cost(cost as f64).names_masks());
    }
    let cost = n_embd * options.padded_vocab();
    list.push(LayerSpec::new("head", move |layer| model.last(layer)).cost(cost as f64).names_masks());
    list.tie(WTE, &["embed", "head"]);
    Ok(list)
}

/// What all layers know.
#[derive(Debug, Clone)]
struct Shared {
    ranks: ModelRanks,
    options: GptOptions,
}

impl Shared {
    fn wte(&self, layer: &LayerBuilder<'_>) -> Result<Tensor, LayerError> {
        layer.tied(WTE, |path, name| Ok(GptEmbedding::of_tokens(&self.ranks, path, name, &self.options)?))
    }

    fn first(&self, layer: &LayerBuilder<'_>) -> Result<Box<dyn Layer>, LayerError> {
        let wte = self.wte(layer)?;
        let embedding = GptEmbedding::with_tokens(wte, &self.ranks, &layer.root(), &self.options)?;
        Ok(Box::new(First { embedding, model: self.clone() }))
    }

    fn middle(&self, layer: &LayerBuilder<'_>, index: usize) -> Result<Box<dyn Layer>, LayerError> {
        let block = Block::new(&self.ranks, &layer.path(), &self.options)?;
        let block = OneBlock::new(block, index, self.options.checkpoint);
        Ok(Box::new(Middle { block, model: self.clone() }))
    }

    fn last(&self, layer: &LayerBuilder<'_>) -> Result<Box<dyn Layer>, LayerError> {
        let ln_f = LayerNorm::new(layer.root() / "ln_f", self.options.n_embd);
        let head = Head::new(&self.wte(layer)?, self.options.vocab_size);
        Ok(Box::new(Last { ln_f, head, model: self.clone() }))
    }

    fn dropout(&self, mode: Mode) -> f64 {
        if mode.is_train() { self.options.dropout } else { 0.0 }
    }

    /// The pass of a part; `None` if a rank has all of its layers and texts.
    fn pass(&self, targets: &Tensor, mode: Mode) -> Option<Pass> {
        let len = targets.size().last().copied().unwrap_or(0);
        self.ranks.is_cut().then(|| Pass::new(&self.ranks, len, self.dropout(mode)))
    }
}

struct First {
    embedding: GptEmbedding,
    model: Shared,
}

struct Middle {
    block: OneBlock<Block>,
    model: Shared,
}

struct Last {
    ln_f: LayerNorm,
    head: Head,
    model: Shared,
}

impl Layer for First {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [tokens, targets] = tensors_of(xs)?;
        let states = match self.model.pass(&targets, mode) {
            Some(pass) => pass.embedded(&self.embedding, &self.model.options, &tokens)?,
            None => self.embedding.forward(&tokens, 0, self.model.dropout(mode)),
        };
        Ok(vec![states, targets])
    }
}

impl Layer for Middle {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [states, targets] = tensors_of(xs)?;
        let states = match self.model.pass(&targets, mode) {
            Some(pass) => pass.through(&self.block, &states)?,
            None => {
                let p = self.model.dropout(mode);
                let forward = move |block: &Block, xs: &[Tensor]| {
                    block.forward(Residual::new(xs[0].shallow_clone()), None, p).past
                };
                self.block.forward(&[&states], forward)
            }
        };
        Ok(vec![states, targets])
    }
}

impl Layer for Last {
    fn forward(&self, xs: Boundary, mode: Mode) -> Result<Boundary, LayerError> {
        let [states, targets] = tensors_of(xs)?;
        let sum = match self.model.pass(&targets, mode) {
            Some(pass) => pass.loss(&self.ln_f, &self.head, &self.model.options, [&states, &targets])?,
            None => {
                let (_, normed) = Residual::new(states).normed(&self.ln_f);
                let chunks = self.model.options.loss_chunks;
                self.head.loss(&normed.f_flatten(0, 1)?, &targets.f_reshape([-1])?, chunks)?
            }
        };
        Ok(vec![sum])
    }
}

/// The number of layers of the list.
pub(crate) fn num_layers(n_layer: usize) -> usize {
    n_layer + 2
}
