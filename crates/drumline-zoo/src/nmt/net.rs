//! The Transformer of a configuration.

use tch::nn::VarStore;

use super::bitext::Codecs;
use super::config::NmtConfig;
use crate::error::ZooError;
use crate::models::transformer::{NormPlace, Specials, Transformer, TransformerOptions};

/// Builds the network with its initial weights.
pub(crate) fn transformer(
    config: &NmtConfig,
    codecs: &Codecs,
    store: &VarStore,
) -> Result<Transformer, ZooError> {
    Transformer::new(&store.root(), &options_of(config, codecs))
}

/// The sizes of the network.
pub(crate) fn options_of(config: &NmtConfig, codecs: &Codecs) -> TransformerOptions {
    let model = &config.model;
    TransformerOptions {
        n_layers: model.n_layers as i64,
        n_head: model.n_head as i64,
        d_word_vec: model.d_word_vec as i64,
        d_model: model.d_model as i64,
        d_inner_hid: model.d_inner_hid as i64,
        dropout: model.dropout,
        proj_share_weight: model.proj_share_weight,
        share_embeddings: model.share_embeddings,
        norm: NormPlace::Before,
        src_vocab: codecs.source.vocabulary().len() as i64,
        tgt_vocab: codecs.target.vocabulary().len() as i64,
        pad: Specials::default().pad,
        checkpoint: model.checkpoint,
    }
}
