//! From a configuration to the parts that several commands need.

use std::path::Path;

use anyhow::ensure;
use drumline_text::GptTokenizer;
use tch::nn::VarStore;

use super::found::{BYTES, check_beside};
use crate::gpt::{GptConfig, TokenData, weights};
use crate::models::gpt::Gpt;
use crate::program::args::RunArgs;
use crate::program::checked::{check_device, check_weights};

/// In `OUT_DIR`: what the run's tokens are.
pub(super) const TOKENIZER: &str = "tokenizer.json";

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
        let n_head = config.model.n_head;
        config.model.weights.as_deref().map_or(Ok(()), |weights| check_beside(weights, n_head))?;
        check_device(config.run.device)?;
        let tokenizer = tokenizer(&config)?;
        Ok(Self { config, tokenizer })
    }

    /// The windows of a file that the configuration names.
    pub(super) fn data(&self, key: &str, path: &Path) -> anyhow::Result<TokenData> {
        let example = match path.starts_with("data/story") || path.starts_with("./data/story") {
            true => "; drumline data synth-story --out data/story makes the example's text",
            false => "",
        };
        ensure!(!path.is_dir(), "{key}: {} is a folder; try a file of tokens in it", path.display());
        ensure!(
            path.is_file(),
            "{key}: no file {0}; try drumline data tokens TEXT --out {0}{example}",
            path.display()
        );
        Ok(TokenData::open(path, &self.tokenizer, self.config.model.block)?)
    }

    /// Refuses to go on in `OUT_DIR` with weights or tokens that mean something else there: heads are seen in no tensor's shape. A run leaves its tokenizer beside
    /// the checkpoints, unless tokens are bytes.
    pub(super) fn same_model(&self) -> anyhow::Result<()> {
        let (folder, file) = (&self.config.run.out_dir, self.config.run.out_dir.join(TOKENIZER));
        if let Ok(last) = GptConfig::load::<&str>(Some(&folder.join(&self.config.run.cfg_dest)), &[]) {
            let (heads, now) = (last.model.n_head, self.config.model.n_head);
            ensure!(
                heads == now,
                "the run in {} has MODEL.N_HEAD {heads}, and now it is {now}: with the same weights that is another model; try MODEL.N_HEAD \
                 {heads}, or another OUT_DIR",
                folder.display()
            );
            ensure!(
                last.tokens.tokenizer == Path::new(BYTES) || file.is_file(),
                "the run in {} has lost its {TOKENIZER}, so nobody can tell whether its tokens are those of GPT.TOKENIZER {}; try to put it \
                 back (it last ran with {}), or another OUT_DIR",
                folder.display(),
                self.config.tokens.tokenizer.display(),
                last.tokens.tokenizer.display()
            );
        }
        let (kept, name) = match file.is_file() {
            true => (GptTokenizer::open(&file)?, file),
            false => (GptTokenizer::bytes(), BYTES.into()),
        };
        ensure!(
            kept.fingerprint() == self.tokenizer.fingerprint(),
            "the run in {} has another tokenizer, of {} tokens, than GPT.TOKENIZER {}, of {}; try GPT.TOKENIZER {}, or another OUT_DIR",
            folder.display(),
            kept.vocabulary(),
            self.config.tokens.tokenizer.display(),
            self.tokenizer.vocabulary(),
            name.display()
        );
        Ok(())
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

/// The tokenizer that the configuration names. A run keeps its own in `OUT_DIR`.
fn tokenizer(config: &GptConfig) -> anyhow::Result<GptTokenizer> {
    let (name, kept) = (&config.tokens.tokenizer, config.run.out_dir.join(TOKENIZER));
    let advice = match kept.is_file() {
        true => format!("the run's own, {}", kept.display()),
        false => "bytes, a tokenizer.json, or a folder with vocab.json and merges.txt, which drumline data bpe makes".into(),
    };
    let is_there = name == Path::new(BYTES) || name.exists();
    ensure!(is_there, "GPT.TOKENIZER: there is no {}; try {advice}", name.display());
    Ok(GptTokenizer::open(name)?)
}
