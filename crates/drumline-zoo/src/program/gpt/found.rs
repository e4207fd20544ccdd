//! A trained model in a folder: a run's, or one of Hugging Face's; and the latter written.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use drumline_text::GptTokenizer;
use serde::Deserialize;
use tch::Device;
use tch::nn::VarStore;

use crate::gpt::{GptConfig, weights};
use crate::models::gpt::{Gpt, GptOptions};
use crate::program::kind::{Kind, kind_of};
use crate::program::nmt::weights_file;

/// A trained model.
pub(super) struct Found {
    pub(super) options: GptOptions,
    pub(super) weights: PathBuf,
    pub(super) tokenizer: GptTokenizer,
}

/// The configuration in a folder of Hugging Face's.
const HF_CONFIG: &str = "config.json";

/// The tokenizer that has no files.
const BYTES: &str = "bytes";

/// Hugging Face's `config.json`, as far as it is needed.
#[derive(Deserialize)]
struct HfConfig {
    n_layer: i64,
    n_head: i64,
    n_embd: i64,
    /// GPT-2's own files have it under both names.
    n_positions: Option<i64>,
    n_ctx: Option<i64>,
    vocab_size: i64,
    /// Ours: there are no files for it.
    #[serde(default, rename = "drumline_tokenizer")]
    tokenizer: Option<String>,
}

impl Found {
    /// Of a run's `OUT_DIR`, or of Hugging Face's files.
    pub(super) fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let of_run = folder.join("config.yaml");
        let of_hf = folder.join(HF_CONFIG);
        ensure!(
            folder.is_dir(),
            "--from {}: no such folder; try the OUT_DIR of a training",
            folder.display()
        );
        ensure!(
            of_run.is_file() || of_hf.is_file(),
            "--from {}: neither config.yaml of a run nor config.json of Hugging Face's is there; try the OUT_DIR of a training",
            folder.display()
        );
        if of_run.is_file() { Self::of_run(folder, &of_run) } else { Self::of_hf(folder, &of_hf) }
    }

    fn of_run(folder: &Path, config: &Path) -> anyhow::Result<Self> {
        ensure!(
            kind_of(config) == Kind::Gpt,
            "{} is not the configuration of a GPT; try the OUT_DIR of a training with a section GPT",
            config.display()
        );
        let config = GptConfig::load::<&str>(Some(config), &[])?;
        // A run leaves its tokenizer beside the checkpoints.
        let tokenizer = match config.tokens.tokenizer == Path::new(BYTES) {
            true => GptTokenizer::bytes(),
            false => GptTokenizer::open(folder.join("tokenizer.json"))?,
        };
        let options = config.model.options(tokenizer.vocabulary());
        Ok(Self { options, weights: weights_file(&folder.join("checkpoints"))?, tokenizer })
    }

    fn of_hf(folder: &Path, config: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot read {} as the configuration of a GPT-2", config.display());
        let read = std::fs::read(config).with_context(cannot)?;
        let HfConfig { n_layer, n_head, n_embd, n_positions, n_ctx, vocab_size, tokenizer } =
            serde_json::from_slice(&read).with_context(cannot)?;
        let n_positions = n_positions.or(n_ctx).context("it has no n_positions").with_context(cannot)?;
        let options =
            GptOptions { n_layer, n_head, n_embd, n_positions, vocab_size, ..GptOptions::default() };
        let tokenizer = match tokenizer.as_deref() {
            Some(BYTES) => GptTokenizer::bytes(),
            _ => GptTokenizer::open(folder)?,
        };
        Ok(Self { options, weights: weights_file(folder)?, tokenizer })
    }

    /// The network with its weights, in `store`.
    pub(super) fn net(&self, store: &VarStore) -> anyhow::Result<Gpt> {
        let net = Gpt::new(&store.root(), &self.options)?;
        weights::load(store, &self.options, &self.weights)?;
        Ok(net)
    }

    /// Writes what Hugging Face's `from_pretrained` and [`in_folder`](Self::in_folder) read: weights in f32 without added rows, configuration, tokenizer. The
    /// configuration comes last, so that a folder with one is whole.
    pub(super) fn export(&self, folder: &Path) -> anyhow::Result<()> {
        let cannot = || format!("cannot write to {}; try another --out", folder.display());
        std::fs::create_dir_all(folder).with_context(cannot)?;
        let store = VarStore::new(Device::Cpu);
        self.net(&store)?;
        weights::save(&store, &self.options, &folder.join("model.safetensors"))?;
        let tokenizer = self.tokenizer.save(folder)?;
        let config = self.config(tokenizer.is_none());
        let text = serde_json::to_string_pretty(&config)? + "\n";
        std::fs::write(folder.join(HF_CONFIG), text).with_context(cannot)
    }

    fn config(&self, is_bytes: bool) -> serde_json::Value {
        let GptOptions { n_layer, n_head, n_embd, n_positions, vocab_size, dropout, .. } = self.options;
        let end = self.tokenizer.end_of_text();
        let mut config = serde_json::json!({
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "n_positions": n_positions, "n_ctx": n_positions,
            "vocab_size": vocab_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout,
            "bos_token_id": end, "eos_token_id": end,
            "tie_word_embeddings": true,
            "torch_dtype": "float32",
        });
        if is_bytes {
            config["drumline_tokenizer"] = BYTES.into();
        }
        config
    }
}
