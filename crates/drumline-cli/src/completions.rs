//! `drumline completions`: the script with which a shell completes our command lines.

use std::io::Write;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;

const EXAMPLES: &str = "\
Examples:
  drumline completions bash > ~/.local/share/bash-completion/completions/drumline
  drumline completions zsh > ~/.zfunc/_drumline                    with fpath+=~/.zfunc before compinit in ~/.zshrc
  drumline completions fish > ~/.config/fish/completions/drumline.fish

Open a new shell afterwards.";

/// Print the script with which a shell completes drumline's command lines
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script for the whole command line to stdout.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "drumline", &mut script);
    std::io::stdout().write_all(&script).context("cannot print")
}
