//! The commands of `faults.rs`, where this program was built without them: cargo builds it again with the feature
//! `faults` and hands the arguments over. So nobody who wants something else waits for the launcher to be compiled.

use crate::workspace::cargo;
use anyhow::Context;
use std::ffi::OsString;
use std::process::ExitCode;

/// The commands.
#[derive(clap::Subcommand)]
pub(crate) enum Faults {
    /// Pull the cable between two hosts again and again while they train, and see what comes of it (needs root)
    Outages(Rest),
    /// Train on two hosts under random faults, run after run, and compare each with a run without faults (needs root)
    Soak(Rest),
}

/// Whatever follows.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

impl Faults {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let (name, rest) = match self {
            Self::Outages(rest) => ("outages", rest),
            Self::Soak(rest) => ("soak", rest),
        };
        let mut command = cargo();
        command.args(["run", "--quiet", "--package", "xtask", "--features", "faults", "--", name]);
        let status = command.args(rest.args).status().context("cannot start cargo")?;
        // A signal ends it without a code.
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }
}
