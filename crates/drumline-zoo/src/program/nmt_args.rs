//! NJUNMT's command line.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;

use crate::config::DeviceKind;
use crate::nmt::NmtConfig;

const EXAMPLES: &str = "\
Examples:
  drumline data synth-translation --out data/translation
  drumline run --nproc-per-node 2 -- drumline-train nmt --config_path config/nmt.yaml --saveto exp/save --log_path exp/log --valid_path exp/valid
  drumline run --nproc-per-node 2 -- drumline-train nmt --config_path config/nmt.yaml --saveto exp/save --reload

The flags are NJUNMT's, with its defaults; drumline train --cfg FILE does the same, with these as keys of run_configs.";

/// Train a translation model with NJUNMT's command line
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct NmtArgs {
    /// The configuration: NJUNMT's YAML
    #[arg(long = "config_path", alias = "config-path", alias = "cfg", value_name = "FILE")]
    config_path: PathBuf,
    /// Name of the model, for messages
    #[arg(long = "model_name", alias = "model-name", value_name = "NAME")]
    model_name: Option<String>,
    /// Resume from the last checkpoint in --saveto
    #[arg(long)]
    reload: bool,
    /// Folder of metrics.jsonl, log.txt and TensorBoard's files [default: ./log]
    #[arg(long = "log_path", alias = "log-path", value_name = "DIR")]
    log_path: Option<PathBuf>,
    /// Folder of checkpoints [default: ./save]
    #[arg(long, value_name = "DIR")]
    saveto: Option<PathBuf>,
    /// Folder of translations made in validations [default: ./valid]
    #[arg(long = "valid_path", alias = "valid-path", value_name = "DIR")]
    valid_path: Option<PathBuf>,
    /// Initial weights: a .safetensors file, or a checkpoint
    #[arg(long = "pretrain_path", alias = "pretrain-path", value_name = "PATH")]
    pretrain_path: Option<PathBuf>,
    /// Compute on GPUs, each rank on the one that LOCAL_RANK names [default: where there are some]
    #[arg(long = "use_gpu", alias = "use-gpu")]
    use_gpu: bool,
    /// Exchange large objects through files in this folder, which all ranks see [default: sent from rank to rank]
    #[arg(long = "shared_dir", alias = "shared-dir", value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// Flag of NJUNMT's launcher; ignored, as the number of ranks is known
    #[arg(long = "multi_gpu", alias = "multi-gpu", hide = true)]
    _multi_gpu: bool,
    /// NJUNMT's way to see more; here DRUMLINE_LOG=debug
    #[arg(long, hide = true)]
    _debug: bool,
    /// Keys of the configuration with their values, which override the file
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_names = ["KEY", "VALUE"])]
    pairs: Vec<String>,
}

impl NmtArgs {
    /// Loads the file's configuration and applies the flags.
    pub(super) fn config(self) -> anyhow::Result<NmtConfig> {
        if let Some(flag) = self.pairs.iter().step_by(2).find(|key| key.starts_with("--")) {
            bail!("there is no flag {flag}; try drumline-train nmt --help");
        }
        let mut config = NmtConfig::load(Some(&self.config_path), &self.pairs)?;
        let run = &mut config.run;
        run.reload = if self.reload { Some(true) } else { run.reload.or(Some(false)) };
        run.device = if self.use_gpu { DeviceKind::Cuda } else { run.device };
        run.model_name = self.model_name.unwrap_or_else(|| run.model_name.clone());
        let folders = [
            (&mut run.log_path, self.log_path),
            (&mut run.saveto, self.saveto),
            (&mut run.valid_path, self.valid_path),
        ];
        for (folder, given) in folders {
            *folder = given.unwrap_or_else(|| folder.clone());
        }
        run.pretrain_path = self.pretrain_path.or(run.pretrain_path.take());
        run.shared_dir = self.shared_dir.or(run.shared_dir.take());
        Ok(config)
    }
}
