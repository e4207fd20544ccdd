//! Builds the network of a configuration.

use drumline_text::Vocabulary;
use tch::nn::{ModuleT, Path};

use super::config::{NetName, TextConfig, TextTask};
use super::lexicon::Lexicon;
use crate::error::ZooError;
use crate::models::text::{Pool, TextClassifier, TextNet, TextOptions, TextTagger};

/// Builds the network under `path`, with sizes for the words and labels of a lexicon.
pub fn build(path: &Path<'_>, config: &TextConfig, lexicon: &Lexicon) -> Result<Box<dyn ModuleT>, ZooError> {
    let options = options(config, lexicon.words.len(), lexicon.labels.len());
    Ok(match config.labels.task {
        TextTask::Classify => Box::new(TextClassifier::new(path, &options)?),
        TextTask::Tag => Box::new(TextTagger::new(path, &options)?),
    })
}

pub(super) fn options(config: &TextConfig, words: usize, classes: usize) -> TextOptions {
    let model = &config.model;
    let n_layers = model.n_layers as i64;
    let net = match model.net {
        NetName::BiLstm => TextNet::BiLstm { n_layers, d_hidden: model.d_hidden as i64 },
        NetName::Transformer => TextNet::Transformer {
            n_layers,
            n_head: model.n_head as i64,
            d_inner_hid: model.d_inner_hid as i64,
            pool: Pool::Mean,
        },
    };
    TextOptions {
        net,
        vocab: words as i64,
        pad: i64::from(Vocabulary::PAD),
        d_word_vec: model.d_word_vec as i64,
        num_classes: classes as i64,
        dropout: model.dropout,
        checkpoint: model.checkpoint,
    }
}
