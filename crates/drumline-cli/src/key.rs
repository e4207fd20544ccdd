//! `drumline key`: makes the key with which the machines of a job prove that they belong together.

use std::path::PathBuf;

use drumline_rendezvous::{JobKey, worker_env};

const EXAMPLES: &str = "\
Examples:
  drumline key new job.key                   64 hex digits in a file that only you can read
  scp -p job.key node1:                      the same file on every machine
  export DRUMLINE_JOB_KEY_FILE=$PWD/job.key  for all ranks, or for `drumline run` on every machine

Ranks on one machine need none: rank 0, or the launcher, makes one.";

/// Make the key that a job between machines needs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KeyArgs {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Debug, clap::Subcommand)]
enum KeyCommand {
    /// Write a new random key to FILE, with mode 600; an existing file is not changed
    New {
        /// The file to make
        file: PathBuf,
    },
}

/// Prints to stderr what to do next; stdout stays empty.
pub(crate) fn key(args: &KeyArgs) -> anyhow::Result<()> {
    let KeyCommand::New { file } = &args.command;
    JobKey::new_file(file)?;
    let file = file.display();
    eprintln!(
        "made {file}; copy it to every machine of the job (`scp -p`) and set {}={file} there",
        worker_env::DRUMLINE_JOB_KEY_FILE
    );
    Ok(())
}
