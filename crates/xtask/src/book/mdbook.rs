//! The mdBook program: built once per user, into the cache of `cargo xtask libtorch`.
//!
//! It is no dependency of this crate: it needs a minute to build, and only this command uses it. Its dev profile without debugging
//! information takes a third of the time of its release profile, and builds our pages in a few seconds.

use crate::libtorch::cache;
use crate::workspace::cargo;
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

const VERSION: &str = "0.5.4";

/// The program, which is built if it is not in the cache.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    let (cache, name) = (cache::folder()?, format!("mdbook-{VERSION}"));
    let _lock = cache::lock(&cache, &name)?;
    let ready = cache.join(&name);
    let program = ready.join("bin/mdbook");
    if !program.exists() {
        install(&ready, &cache.join(format!("{name}.part")))?;
    }
    Ok(program)
}

fn install(ready: &Path, part: &Path) -> anyhow::Result<()> {
    eprintln!("building mdBook {VERSION}, once, into {}", ready.display());
    let site = cache::prepare_part(part)?;
    let mut command = cargo();
    command.args(["install", "--locked", "--debug", "--no-default-features", "--features", "search"]);
    command.args(["--version", VERSION, "mdbook", "--root"]).arg(&site);
    // Not in the repository: its `.cargo/config.toml` has flags for libtorch.
    command
        .current_dir(part)
        .env("CARGO_TARGET_DIR", part.join("tmp"))
        .env("CARGO_PROFILE_DEV_DEBUG", "false");
    let status = command.status().context("cannot start cargo install")?;
    if !status.success() {
        bail!("cannot build mdBook: cargo install: {status}; try again when the registry can be reached");
    }
    cache::keep(&site, ready, part)
}
