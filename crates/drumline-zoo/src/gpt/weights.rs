//! A GPT-2's weights from and to safetensors files by Hugging Face's names.
//!
//! ```text
//!   transformer.h.0.attn.c_attn.weight ─┐                                     ┌ h.0.attn.bias, …masked_bias: masks of older files
//!               h.0.attn.c_attn.weight ─┴▶ h.0.attn.c_attn.weight    left out ┴ lm_head.weight: the embedding once more, or it is refused
//! ```
//! Where the model's embedding has rows that were added, a file without them fills the others.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use tch::Tensor;
use tch::nn::VarStore;

use crate::error::ZooError;
use crate::models::gpt::GptOptions;
use crate::weights::{Views, copy_alike, save_tensors, with_views};

const EMBEDDING: &str = "wte.weight";
const HEAD: &str = "lm_head.weight";
const PREFIX: &str = "transformer.";

/// Load all weights of the model that `options` made in `store`.
///
/// ```
/// use drumline_zoo::gpt::weights;
/// use drumline_zoo::models::gpt::{Gpt, GptOptions};
/// use tch::{Device, nn::VarStore};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("model.safetensors");
/// let small = GptOptions { n_layer: 1, n_head: 2, n_embd: 8, n_positions: 8, vocab_size: 30, ..Default::default() };
/// let padded = GptOptions { vocab_multiple: 64, ..small.clone() };
/// let (first, second) = (VarStore::new(Device::Cpu), VarStore::new(Device::Cpu));
/// Gpt::new(&first.root(), &padded)?;
/// Gpt::new(&second.root(), &small)?;
/// weights::save(&first, &padded, &file)?;
/// weights::load(&second, &small, &file)?;
/// assert_eq!(second.variables()["wte.weight"], first.variables()["wte.weight"].narrow(0, 0, 30));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(store: &VarStore, options: &GptOptions, path: &Path) -> Result<(), ZooError> {
    with_views(path, |views| {
        let views = renamed(views, path)?;
        let mut variables: BTreeMap<_, _> = store.variables().into_iter().collect();
        let rows = views.get(EMBEDDING).and_then(|view| view.shape().first().copied());
        if rows != Some(options.padded_vocab() as usize) {
            narrow_embedding(&mut variables, options);
        }
        copy_alike(variables, &views, path)
    })
}

/// Write all weights, without added rows: what Hugging Face's `GPT2Model` and `GPT2LMHeadModel` load.
pub fn save(store: &VarStore, options: &GptOptions, path: &Path) -> Result<(), ZooError> {
    let mut tensors: BTreeMap<_, _> = store.variables().into_iter().collect();
    narrow_embedding(&mut tensors, options);
    save_tensors(tensors, path)
}

/// By the model's own names; without what is no weight.
fn renamed<'a>(views: Views<'a>, path: &Path) -> Result<Views<'a>, ZooError> {
    let is_mask = |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    let kept = views.into_iter().filter(|(name, _)| !is_mask(name));
    let mut named: Views<'_> =
        kept.map(|(name, view)| (name.strip_prefix(PREFIX).unwrap_or(name), view)).collect();
    if let (Some(head), Some(embedding)) = (named.remove(HEAD), named.get(EMBEDDING))
        && !is_same(&head, embedding)
    {
        return Err(ZooError::UnfitTensor {
            path: path.to_owned(),
            name: HEAD.to_owned(),
            message: format!(
                "its values are not those of {EMBEDDING}, expected the same: the model here has one tensor for both; try weights \
                 that were trained with tie_word_embeddings"
            ),
        });
    }
    Ok(named)
}

fn is_same(one: &TensorView<'_>, other: &TensorView<'_>) -> bool {
    (one.dtype(), one.shape(), one.data()) == (other.dtype(), other.shape(), other.data())
}

fn narrow_embedding(tensors: &mut BTreeMap<String, Tensor>, options: &GptOptions) {
    if let Some(embedding) = tensors.get_mut(EMBEDDING) {
        *embedding = embedding.detach().narrow(0, 0, options.vocab_size);
    }
}
