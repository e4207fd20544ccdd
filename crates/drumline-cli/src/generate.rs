//! `drumline generate` and `drumline export`: this process becomes `drumline-train generate` or `drumline-train export`.

use std::ffi::OsString;

use crate::train::become_trainer;

/// Continue texts with a trained GPT; drumline generate --help
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct GenerateArgs {
    /// Passed on to drumline-train unchanged
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Becomes `drumline-train generate …`.
pub(crate) fn generate(args: GenerateArgs) -> anyhow::Result<()> {
    become_trainer("generate", args.args)
}

/// Write a trained GPT as a Hugging Face folder, or a checkpoint of DeepSpeed as safetensors; drumline export --help
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct ExportArgs {
    /// Passed on to drumline-train unchanged
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Becomes `drumline-train export …`.
pub(crate) fn export(args: ExportArgs) -> anyhow::Result<()> {
    become_trainer("export", args.args)
}
