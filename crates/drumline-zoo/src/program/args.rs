//! The command line of `drumline-train`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::deepspeed::DeepSpeedArgs;
use super::doctor::DoctorGpuArgs;
use super::export::ExportArgs;
use super::generate::GenerateArgs;
use super::kind::{Kind, kind_or_file};
use super::nmt_args::NmtArgs;
use super::synth_args::DataCommand;
use super::translate::TranslateArgs;
use crate::config::setting::Setting;
use crate::config::{DeviceKind, Value};
use crate::driver::{Given, TestOptions, WhichModel};

const EXAMPLES: &str = "\
Examples:
  drumline-train train --cfg config/cifar-resnet18.yaml OPTIM.MAX_EPOCH 2
  drumline run --nproc-per-node 2 drumline-train train --cfg config/cifar-resnet18.yaml
  drumline-train train --cfg config/text-classify.yaml
  drumline-train train --cfg config/gpt-tiny.yaml --deepspeed config/deepspeed/zero2.json --explain
  drumline-train data synth-cifar --out data/cifar --train 4000 --test 1000
  drumline-train data synth-text --out data/text
  drumline-train data tokens story.txt --out story.tokens
  drumline-train generate --from exp/gpt-tiny \"Ada had a\"
  drumline-train keys

drumline train starts this program once for each rank.";

/// Train and evaluate networks; one rank of a run
#[derive(Debug, Parser)]
#[command(name = "drumline-train", version, after_help = EXAMPLES)]
pub(super) struct Cli {
    /// Only check the command's configuration and files
    #[arg(long, hide = true)]
    pub(super) check: bool,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Train a network
    Train(TrainArgs),
    /// Evaluate a model on the test set: the run's best, its last with --last, or the weights of MODEL.WEIGHTS
    /// (translation: run_configs.pretrain_path)
    Test(TestArgs),
    Nmt(Box<NmtArgs>),
    Translate(Box<TranslateArgs>),
    Generate(Box<GenerateArgs>),
    Export(ExportArgs),
    /// Generate datasets
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// List the keys of a configuration with their defaults
    Keys {
        /// The kind of configuration (images, translation, text, gpt or mlm), or a configuration file
        #[arg(value_name = "KIND|FILE", default_value = "images", value_parser = kind_or_file)]
        kind: Kind,
        /// As a JSON schema, with which editors complete keys
        #[arg(long)]
        schema: bool,
    },
    /// Report what this machine has, and what is missing
    Doctor {
        #[command(subcommand)]
        command: DoctorCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum DoctorCommand {
    Gpu(DoctorGpuArgs),
}

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
    #[command(flatten)]
    pub(super) deepspeed: DeepSpeedArgs,
    /// Compare the first K steps of one rank with those of all ranks, and write nothing; exit code 1 if they differ
    /// [default: 5 steps]
    #[arg(long, value_name = "K", num_args = 0..=1, require_equals = true, default_missing_value = "5", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) verify_parity: Option<u64>,
}

impl TrainArgs {
    pub(super) fn given(&self) -> anyhow::Result<Given<'_>> {
        Ok(Given { deepspeed: self.deepspeed.file(self.run.device)?, ..self.run.given() })
    }
}

#[derive(Debug, Args)]
pub(super) struct TestArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
    /// Test the run's last checkpoint instead of its best
    #[arg(long)]
    last: bool,
}

impl TestArgs {
    pub(super) fn options(&self) -> TestOptions {
        TestOptions { model: if self.last { WhichModel::Last } else { WhichModel::Best } }
    }
}

/// The arguments from which a configuration is loaded.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// The configuration, a YAML file
    #[arg(long, aliases = ["config_path", "config-path"], value_name = "FILE")]
    pub(super) cfg: PathBuf,
    /// Device to compute on: auto, cpu or cuda; overrides the key DEVICE (translation: run_configs.device)
    #[arg(long, value_name = "DEVICE", value_parser = device_kind)]
    pub(super) device: Option<DeviceKind>,
    /// Keys of the configuration with their values, which override the file
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_names = ["KEY", "VALUE"])]
    pub(super) pairs: Vec<String>,
}

impl RunArgs {
    pub(super) fn given(&self) -> Given<'_> {
        Given { file: &self.cfg, device: self.device, deepspeed: None, pairs: &self.pairs }
    }
}

/// Parses the value of a `--device` flag.
pub(super) fn device_kind(text: &str) -> Result<DeviceKind, UnknownDevice> {
    // `gpu` is accepted as an alias.
    let text = if text == "gpu" { "cuda" } else { text };
    DeviceKind::read(&Value::Text(text.to_owned())).ok_or(UnknownDevice)
}

/// The value of a `--device` flag that names no device.
#[derive(Debug, thiserror::Error)]
#[error("expected {}", DeviceKind::expects())]
pub(super) struct UnknownDevice;
