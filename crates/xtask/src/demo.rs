//! `cargo xtask demo`: build and run the collectives demonstration, from a fresh clone on.

use crate::workspace::cargo;
use anyhow::{Context, bail};

/// Build in release mode and run; what it prints goes straight to the terminal.
pub(crate) fn run() -> anyhow::Result<()> {
    eprintln!("building the demonstration (the first time about a minute) ...");
    let mut command = cargo();
    command.args(["run", "--quiet", "--release", "--package", "drumline-examples", "--bin", "collectives"]);
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the demonstration failed: {status}");
    }
    Ok(())
}
