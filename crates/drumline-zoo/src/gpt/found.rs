//! Loads a trained model from a run's folder or a Hugging Face folder, and exports to the latter.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use drumline_text::GptTokenizer;
use serde::Deserialize;
use serde_json::Value as Json;
use tch::Device;
use tch::nn::VarStore;

use super::config::GptConfig;
use super::task::TOKENIZER;
use super::weights;
use crate::models::gpt::{Gpt, GptOptions};
use crate::program::{Kind, kind_of};
use crate::weights_file::weights_file;

/// A trained model: its options, weights file and tokenizer.
pub(crate) struct Found {
    pub(crate) options: GptOptions,
    pub(crate) weights: PathBuf,
    pub(crate) tokenizer: GptTokenizer,
}

/// The configuration file in a Hugging Face folder.
const HF_CONFIG: &str = "config.json";

/// The name of the byte tokenizer, which has no files.
pub(crate) const BYTES: &str = "bytes";

/// The keys of Hugging Face's `config.json` that are needed.
#[derive(Deserialize)]
struct HfConfig {
    n_layer: i64,
    n_head: i64,
    n_embd: i64,
    /// GPT-2's own files have this value under both names.
    n_positions: Option<i64>,
    n_ctx: Option<i64>,
    vocab_size: i64,
    #[serde(default)]
    eos_token_id: Option<EndOfText>,
    /// A key of ours: the byte tokenizer has no files.
    #[serde(default, rename = "drumline_tokenizer")]
    tokenizer: Option<String>,
}

/// The end-of-text token: one, or a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum EndOfText {
    One(u32),
    Several(Vec<u32>),
}

impl EndOfText {
    fn token(&self) -> anyhow::Result<u32> {
        match self {
            Self::One(token) => Ok(*token),
            Self::Several(tokens) => match tokens[..] {
                [token] => Ok(token),
                _ => bail!("eos_token_id is {tokens:?}, expected one token; try the one that ends a text"),
            },
        }
    }
}

/// A key of `config.json` that changes the computation, and the value that it must have if it is given.
struct Fixed {
    key: &'static str,
    is_known: fn(&Json) -> bool,
    known: &'static str,
}

/// With other values, the model would compute something that is not implemented here.
const FIXED: [Fixed; 7] = [
    Fixed { key: "model_type", is_known: |value| value == "gpt2", known: "gpt2" },
    Fixed { key: "layer_norm_epsilon", is_known: |value| value.as_f64() == Some(1e-5), known: "1e-5" },
    Fixed {
        key: "activation_function",
        is_known: |value| value == "gelu_new" || value == "gelu_pytorch_tanh",
        known: "gelu_new or gelu_pytorch_tanh",
    },
    Fixed { key: "scale_attn_weights", is_known: |value| *value == true, known: "true" },
    Fixed { key: "scale_attn_by_inverse_layer_idx", is_known: |value| *value == false, known: "false" },
    Fixed { key: "tie_word_embeddings", is_known: |value| *value == true, known: "true" },
    Fixed { key: "add_cross_attention", is_known: |value| *value == false, known: "false" },
];

/// Returns an error if `config.json` asks for another computation than GPT-2's.
fn check_computation(config: &Json) -> anyhow::Result<()> {
    let given = |key: &str| config.get(key).filter(|value| !value.is_null());
    for Fixed { key, is_known, known } in &FIXED {
        if let Some(value) = given(key).filter(|value| !is_known(value)) {
            bail!("{key} is {value}, expected {known}: it is another model than GPT-2; try one with {known}");
        }
    }
    let of_gpt2 = config["n_embd"].as_i64().map(|n_embd| 4 * n_embd);
    if let (Some(inner), Some(of_gpt2)) = (given("n_inner"), of_gpt2) {
        ensure!(
            inner.as_i64() == Some(of_gpt2),
            "n_inner is {inner}, expected {of_gpt2}, 4 times n_embd, or null: it is another model than GPT-2; try one with {of_gpt2}"
        );
    }
    Ok(())
}

/// Checks the `config.json` beside weights in a Hugging Face folder; other weights have none. The number of heads is
/// checked too, because no tensor's shape shows it.
pub(crate) fn check_beside(weights: &Path, n_head: usize) -> anyhow::Result<()> {
    let config = weights.with_file_name(HF_CONFIG);
    let read = match std::fs::read(&config) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.map_err(anyhow::Error::from),
    };
    let checked = read.and_then(|read| Ok(serde_json::from_slice(&read)?)).and_then(|read: Json| {
        check_computation(&read)?;
        let heads =
            read.get("n_head").filter(|heads| !heads.is_null() && heads.as_u64() != Some(n_head as u64));
        heads.map_or(Ok(()), |heads| {
            bail!("n_head is {heads}, and MODEL.N_HEAD {n_head}; try MODEL.N_HEAD {heads}")
        })
    });
    checked.with_context(|| {
        format!("MODEL.WEIGHTS {} cannot be used as {} says", weights.display(), config.display())
    })
}

impl Found {
    /// Finds the model in a run's `OUT_DIR` or in a Hugging Face folder.
    pub(crate) fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let of_run = folder.join("config.yaml");
        let of_hf = folder.join(HF_CONFIG);
        ensure!(
            folder.is_dir(),
            "--from {}: no such folder; try the OUT_DIR of a training",
            folder.display()
        );
        ensure!(
            of_run.is_file() || of_hf.is_file(),
            "--from {} has neither the config.yaml of a run nor the config.json of a Hugging Face model; try a run's OUT_DIR",
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
        // A run writes its tokenizer beside the checkpoints.
        let tokenizer = if config.tokens.tokenizer == Path::new(BYTES) {
            GptTokenizer::bytes()
        } else {
            GptTokenizer::open(folder.join(TOKENIZER))?
        };
        let options = config.model.options(tokenizer.vocabulary());
        Ok(Self { options, weights: weights_file(&folder.join("checkpoints"))?, tokenizer })
    }

    fn of_hf(folder: &Path, config: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot read {} as the configuration of a GPT-2", config.display());
        let read = std::fs::read(config).with_context(cannot)?;
        let read: Json = serde_json::from_slice(&read).with_context(cannot)?;
        check_computation(&read).with_context(cannot)?;
        let HfConfig { n_layer, n_head, n_embd, n_positions, n_ctx, vocab_size, eos_token_id, tokenizer } =
            HfConfig::deserialize(read).with_context(cannot)?;
        let n_positions = n_positions.or(n_ctx).context("it has no n_positions").with_context(cannot)?;
        let options =
            GptOptions { n_layer, n_head, n_embd, n_positions, vocab_size, ..GptOptions::default() };
        let tokenizer = match tokenizer.as_deref() {
            Some(BYTES) => GptTokenizer::bytes(),
            _ => match eos_token_id {
                Some(end) => GptTokenizer::open(folder)?.with_end_of_text(end.token().with_context(cannot)?),
                None => GptTokenizer::open(folder)?,
            },
        };
        Ok(Self { options, weights: weights_file(folder)?, tokenizer })
    }

    /// Builds the network in `store` and loads its weights.
    pub(crate) fn net(&self, store: &VarStore) -> anyhow::Result<Gpt> {
        let net = Gpt::new(&store.root(), &self.options)?;
        weights::load(store, &self.options, &self.weights)?;
        Ok(net)
    }

    /// Writes a folder that Hugging Face's `from_pretrained` and [`in_folder`](Self::in_folder) read: weights in f32
    /// without padding rows, configuration and tokenizer. The configuration is written last, so a folder that has one
    /// is complete.
    pub(crate) fn export(&self, folder: &Path) -> anyhow::Result<()> {
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
