//! `drumline doctor`: what this machine has, and what is missing. GPUs are looked at by `drumline-train`, which has libtorch.

use std::ffi::OsString;

use crate::train::{become_program, trainer};

const EXAMPLES: &str = "\
Examples:
  drumline doctor gpu                                      this machine's GPUs, driver, libraries, bandwidths, NCCL
  drumline doctor gpu --json                               the same as one JSON object
  drumline run --nproc-per-node 4 drumline doctor gpu      also whether all ranks have the same versions, and an all-reduce of theirs

The exit code is 1 where something is missing or does not fit, and the lines say what.";

/// Look at what this machine has, and what is missing: GPUs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    #[command(subcommand)]
    command: DoctorCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DoctorCommand {
    /// Driver, libraries, versions, each GPU's memory and capability, peer access, bandwidths, NCCL
    Gpu {
        /// Print one JSON object instead of lines
        #[arg(long)]
        json: bool,
    },
}

/// Becomes `drumline-train doctor …`.
pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    let DoctorCommand::Gpu { json } = args.command;
    let mut words: Vec<OsString> = vec![trainer()?.into(), "doctor".into(), "gpu".into()];
    words.extend(json.then(|| "--json".into()));
    become_program(&words, &[])
}
