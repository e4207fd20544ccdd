//! What other hosts get from this one: the program, the folder, variables, and which of them is this one.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use drumline_launch::{Fleet, Site, is_exported, parse_env_file};

use super::error::PlanError;
use super::host::Host;

/// The name of the file with more variables, unless DS_ENV_FILE gives another.
const ENV_FILE: &str = ".deepspeed_env";

/// Gathers this for the hosts of `fleet`.
pub(super) fn site(fleet: &Fleet, host: &Host<'_>) -> anyhow::Result<Site> {
    let drumline = std::env::current_exe().context("cannot find the drumline program")?;
    let dir = std::env::current_dir().context("cannot find the working folder")?;
    let names = fleet.hosts.iter().map(|other| other.name.clone());
    Ok(Site {
        agent: drumline.clone(),
        drumline,
        dir,
        variables: variables(host)?,
        here: names.filter(|name| host.is_called(name)).collect::<BTreeSet<_>>(),
    })
}

/// Our own variables that are exported, then those of the files in the home folder and here; a later one wins.
fn variables(host: &Host<'_>) -> Result<Vec<(OsString, OsString)>, PlanError> {
    let mut variables: Vec<_> = std::env::vars_os().filter(|(name, _)| is_exported(name)).collect();
    let name = PathBuf::from((host.env)("DS_ENV_FILE").unwrap_or_else(|| ENV_FILE.into()));
    let home = (host.env)("HOME").map(|home| PathBuf::from(home).join(&name));
    // A full path is the same in both folders.
    let home = home.filter(|path| *path != name);
    for path in home.iter().chain([&name]) {
        variables.extend(in_file(path)?);
    }
    Ok(variables)
}

fn in_file(path: &Path) -> Result<Vec<(OsString, OsString)>, PlanError> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(PlanError::EnvFile { path: path.to_path_buf(), source }),
        Ok(text) => text,
    };
    parse_env_file(&text).map_err(|source| PlanError::EnvLine { path: path.to_path_buf(), source })
}
