//! The flags of a `ds_config.json`, and `--explain`: what each of its lines does, without training.

use std::io::Write;

use clap::Args;
use drumline::comm::world_size_from_env;

use super::kind::{kind_of, with_task};
use crate::config::{DeepSpeedFile, DeviceKind};
use crate::driver::{self, Given};
use crate::task::Task;

/// The flags of a `ds_config.json`.
#[derive(Debug, Args)]
pub(super) struct DeepSpeedArgs {
    /// DeepSpeed's configuration, a ds_config.json; its "auto" values are those of --cfg and of the keys
    #[arg(long, aliases = ["deepspeed_config", "deepspeed-config"], value_name = "FILE")]
    deepspeed: Option<String>,
    /// Print what each line of --deepspeed does here, and train nothing; exit code 1 if the file cannot be used
    #[arg(long, requires = "deepspeed")]
    pub(super) explain: bool,
    /// With --explain: as JSON
    #[arg(long, requires = "explain")]
    json: bool,
    /// Keys of --deepspeed that DeepSpeed does not have are errors
    #[arg(long, requires = "deepspeed")]
    strict: bool,
}

/// The form of an explanation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Table,
    Json,
}

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{file} cannot be used: {mistakes} mistakes, which are listed; try it again without them")]
struct Unusable {
    file: String,
    mistakes: usize,
}

impl DeepSpeedArgs {
    /// The file, and the number of ranks of this job.
    pub(super) fn file(&self, device: Option<DeviceKind>) -> anyhow::Result<Option<DeepSpeedFile>> {
        let Some(argument) = self.deepspeed.clone() else { return Ok(None) };
        let num_ranks = world_size_from_env()?;
        Ok(Some(DeepSpeedFile { argument, is_strict: self.strict, num_ranks, device }))
    }

    pub(super) fn form(&self) -> Form {
        if self.json { Form::Json } else { Form::Table }
    }
}

/// Prints what each line of the file does. Returns an error if the file cannot be used.
pub(super) fn explain(given: &Given<'_>, form: Form) -> anyhow::Result<()> {
    let explanation = with_task!(kind_of(given.file), T => driver::explained::<<T as Task>::Config>(given)?);
    let Some(explanation) = explanation else { return Ok(()) };
    let text = match form {
        Form::Table => explanation.to_string(),
        Form::Json => format!("{:#}\n", serde_json::to_value(&explanation)?),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    match explanation.mistakes.len() {
        0 => Ok(()),
        mistakes => Err(Unusable { file: explanation.file, mistakes }.into()),
    }
}
