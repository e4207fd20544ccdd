//! From a configuration to the parts that several commands need.

use std::path::Path;

use anyhow::ensure;
use drumline_text::GptTokenizer;
use tch::nn::VarStore;

use crate::gpt::{GptConfig, TokenData, weights};
use crate::models::gpt::Gpt;
use crate::program::args::RunArgs;
use crate::program::checked::{check_device, check_weights};

/// What every rank finds out alone, before it waits for the others.
pub(super) struct Checked {
    pub(super) config: GptConfig,
    pub(super) tokenizer: GptTokenizer,
}

impl Checked {
    pub(super) fn new(args: &RunArgs) -> anyhow::Result<Self> {
        let mut config = GptConfig::load(Some(&args.cfg), &args.pairs)?;
        config.run.device = args.device.unwrap_or(config.run.device);
        check_weights(config.model.weights.as_deref())?;
        check_device(config.run.device)?;
        let tokenizer = GptTokenizer::open(&config.tokens.tokenizer)?;
        Ok(Self { config, tokenizer })
    }

    /// The windows of a file that the configuration names.
    pub(super) fn data(&self, key: &str, path: &Path) -> anyhow::Result<TokenData> {
        let example = match path.starts_with("data/story") || path.starts_with("./data/story") {
            true => "; drumline data synth-story --out data/story makes the example's text",
            false => "",
        };
        ensure!(
            path.is_file(),
            "{key}: no file {0}; try drumline data tokens TEXT --out {0}{example}",
            path.display()
        );
        Ok(TokenData::open(path, &self.tokenizer, self.config.model.block)?)
    }

    /// The network, with the weights of `MODEL.WEIGHTS` or fresh ones.
    pub(super) fn net(&self, store: &VarStore) -> anyhow::Result<Gpt> {
        let options = self.config.model.options(self.tokenizer.vocabulary());
        let net = Gpt::new(&store.root(), &options)?;
        if let Some(file) = &self.config.model.weights {
            weights::load(store, &options, file)?;
        }
        Ok(net)
    }
}
