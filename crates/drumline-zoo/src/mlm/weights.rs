//! Loads BERT weights from safetensors files with Hugging Face's names. [`weights::save`](crate::weights::save) writes
//! them.
//!
//! ```text
//!   bert.embeddings.LayerNorm.gamma, beta          older files: renamed to weight, bias
//!   cls.predictions.decoder.weight, bias           tied to other tensors; an error if the values differ
//!   bert.pooler.…, cls.seq_relationship.…, bert.embeddings.position_ids     ignored
//! ```

use std::path::Path;

use tch::nn::VarStore;

use crate::error::ZooError;
use crate::first_weights::FirstWeights;
use crate::weights::{Holding, Tensors, copy_parts, read, remove_tied};

/// Tensors of `BertForPreTraining` and older files that `BertForMaskedLM` does not have.
const LEFT_OUT: [&str; 3] = ["bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids"];
/// Tensors that a file may store a second time, with the name of the first.
const TIED: [(&str, &str); 2] = [
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
];

/// Loads all weights of the [`Bert`](crate::models::bert::Bert) in `store`.
pub fn load(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    load_parts(store, &Holding::default(), path)
}

/// Loads what this rank holds of a model that is cut among ranks. The files are those of whole models.
pub fn load_parts(store: &VarStore, holding: &Holding, path: &Path) -> Result<(), ZooError> {
    if FirstWeights::of_this_build().leaves(path) {
        return Ok(());
    }
    let mut saved = read(path)?;
    saved.retain(|name, _| !LEFT_OUT.iter().any(|left_out| name.starts_with(left_out)));
    let own = |name: String| {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    };
    let mut saved: Tensors = saved.into_iter().map(|(name, tensor)| (own(name), tensor)).collect();
    TIED.iter().try_for_each(|(tied, to)| remove_tied(&mut saved, tied, to, path))?;
    saved.retain(|name, _| !holding.elsewhere.contains(name));
    copy_parts(store.variables().into_iter().collect(), &holding.parts, &saved, path)
}
