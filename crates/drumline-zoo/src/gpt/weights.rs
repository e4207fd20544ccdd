//! Loads and saves GPT-2 weights as safetensors with Hugging Face's names.
//!
//! ```text
//!   transformer.h.0.attn.c_attn.weight, or h.0.attn.c_attn.weight  ─▶ h.0.attn.c_attn.weight
//!   h.0.attn.bias, h.0.attn.masked_bias                            masks in older files: ignored
//!   lm_head.weight                                                 tied to wte.weight; an error if the values differ
//! ```
//! If the model's embedding has padding rows, a file without them fills only the other rows.

use std::path::Path;

use tch::nn::VarStore;

use crate::error::ZooError;
use crate::first_weights::FirstWeights;
use crate::models::gpt::GptOptions;
use crate::weights::{Holding, Tensors, copy_alike, copy_parts, read, remove_tied, save_tensors};

const EMBEDDING: &str = "wte.weight";
const HEAD: &str = "lm_head.weight";
const PREFIX: &str = "transformer.";

/// Loads all weights of the model that was built with `options` in `store`.
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
    load_parts(store, options, &Holding::default(), path)
}

/// Loads what this rank holds of a model that is cut among ranks. The files are those of whole models.
pub fn load_parts(
    store: &VarStore,
    options: &GptOptions,
    holding: &Holding,
    path: &Path,
) -> Result<(), ZooError> {
    if FirstWeights::of_this_build().leaves(path) {
        return Ok(());
    }
    let mut saved = renamed(read(path)?, path)?;
    let mut variables: Tensors = store.variables().into_iter().collect();
    let rows = saved.get(EMBEDDING).and_then(|embedding| embedding.size().first().copied());
    let is_narrow = rows != Some(options.padded_vocab());
    saved.retain(|name, _| !holding.elsewhere.contains(name));
    let parts = &holding.parts;
    if parts.is_empty() {
        if is_narrow {
            narrow_embedding(&mut variables, options);
        }
        return copy_alike(variables, &saved, path);
    }
    let mut parts = parts.clone();
    let table = parts.iter_mut().find(|part| part.whole.name == EMBEDDING);
    if let Some((table, own)) = table.zip(variables.get(EMBEDDING)).filter(|_| is_narrow) {
        // The file has no padding rows, and those of this rank keep their values.
        table.whole.size[0] = options.vocab_size;
        let first = table.offsets[0].min(options.vocab_size);
        let rows = own.size()[0].min(options.vocab_size - first);
        table.offsets[0] = first;
        let own = own.detach().narrow(0, 0, rows);
        variables.insert(EMBEDDING.to_owned(), own);
    }
    copy_parts(variables, &parts, &saved, path)
}

/// Writes all weights without padding rows. Hugging Face's `GPT2Model` and `GPT2LMHeadModel` load the file.
pub fn save(store: &VarStore, options: &GptOptions, path: &Path) -> Result<(), ZooError> {
    let mut tensors: Tensors = store.variables().into_iter().collect();
    narrow_embedding(&mut tensors, options);
    save_tensors(tensors, path)
}

/// Renames tensors to the model's names and drops those that are not weights.
fn renamed(saved: Tensors, path: &Path) -> Result<Tensors, ZooError> {
    let is_mask = |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    let kept = saved.into_iter().filter(|(name, _)| !is_mask(name));
    let own = |name: String| name.strip_prefix(PREFIX).map_or_else(|| name.clone(), str::to_owned);
    let mut named: Tensors = kept.map(|(name, tensor)| (own(name), tensor)).collect();
    remove_tied(&mut named, HEAD, EMBEDDING, path)?;
    Ok(named)
}

fn narrow_embedding(tensors: &mut Tensors, options: &GptOptions) {
    if let Some(embedding) = tensors.get_mut(EMBEDDING) {
        *embedding = embedding.detach().narrow(0, 0, options.vocab_size);
    }
}
