//! `cargo xtask libtorch`: the pinned libtorch, fetched once per user.
//!
//! ```text
//!   pip ──▶ CACHE/libtorch-2.11.0.part/site ──checked, renamed──▶ CACHE/libtorch-2.11.0 ◀──link── .libtorch
//! ```
//! CACHE is `$XDG_CACHE_HOME/drumline` or `~/.cache/drumline`. An interrupted run leaves only the `.part`
//! folder: the next one fetches only the packages that had not arrived. A user's `LIBTORCH` wins.

pub(crate) mod cache;
pub(crate) mod pip;
mod verify;

use crate::workspace::root;
use anyhow::bail;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The version that `tch` 0.24 is made for.
pub(crate) const VERSION: &str = "2.11.0";

/// Fetch the pinned libtorch into a cache folder and link it from `.libtorch/`
#[derive(clap::Args, Debug, Default)]
pub(crate) struct LibtorchArgs {
    /// With the CUDA libraries, even when this machine has no GPU
    #[arg(long)]
    cuda: bool,
    /// Print what another project's `.cargo/config.toml` needs to use it, and nothing else
    #[arg(long)]
    print_config: bool,
}

/// Which half is wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Runs on the CPU; the CUDA libraries are left out.
    Cpu,
    /// All of it.
    Cuda,
}

impl Kind {
    /// What this machine can use.
    fn of_machine() -> Self {
        if Path::new("/dev/nvidia0").exists() { Self::Cuda } else { Self::Cpu }
    }

    fn folder(self) -> String {
        let suffix = if self == Self::Cuda { "-cuda" } else { "" };
        format!("libtorch-{VERSION}{suffix}")
    }

    /// How much is fetched, in words.
    fn size(self) -> &'static str {
        match self {
            Self::Cpu => "about 540 MB to fetch, 1.2 GB on disk",
            Self::Cuda => "about 2.5 GB to fetch, 3.8 GB on disk",
        }
    }

    /// Free bytes needed while packages and unpacked files lie side by side.
    fn room(self) -> u64 {
        match self {
            Self::Cpu => 2_500_000_000,
            Self::Cuda => 7_500_000_000,
        }
    }
}

/// Whether [`ensure`] has nothing to download.
pub(crate) fn is_ready() -> anyhow::Result<bool> {
    Ok(chosen_by_user().is_some() || ready(&cache::folder()?, Kind::of_machine()).is_some())
}

/// What every command that builds needs first.
pub(crate) fn ensure() -> anyhow::Result<()> {
    run(&LibtorchArgs::default())
}

/// What a project outside of this workspace needs: where libtorch is, when building and when running.
fn print_config() {
    let ours = root().join(".libtorch/torch");
    let found = chosen_by_user().unwrap_or_else(|| ours.canonicalize().unwrap_or(ours)).display().to_string();
    println!("[env]\nLIBTORCH = {found:?}\n");
    println!("[build]\nrustflags = [\"-C\", \"link-arg=-Wl,-rpath,{found}/lib\"]");
}

/// Make it ready, and say what was asked for.
pub(crate) fn run(args: &LibtorchArgs) -> anyhow::Result<()> {
    make_ready(args)?;
    if args.print_config {
        print_config();
    }
    Ok(())
}

/// Make `.libtorch/` ready, or say why nothing is to be done.
fn make_ready(args: &LibtorchArgs) -> anyhow::Result<()> {
    if let Some(chosen) = chosen_by_user() {
        return accept(&chosen);
    }
    let kind = if args.cuda { Kind::Cuda } else { Kind::of_machine() };
    let cache = cache::folder()?;
    let lock = cache::lock(&cache, &kind.folder())?;
    let ready = match ready(&cache, kind) {
        Some(ready) => {
            eprintln!("libtorch {VERSION} is in {}: nothing to fetch", ready.display());
            ready
        }
        None => fetch(&cache, kind, &lock)?,
    };
    cache::link(&root().join(".libtorch"), &ready)
}

/// `LIBTORCH`, unless it is the value that `.cargo/config.toml` gives.
fn chosen_by_user() -> Option<PathBuf> {
    let value = std::env::var_os("LIBTORCH").filter(|value| !value.is_empty())?;
    let ours = root().join(".libtorch/torch");
    Some(PathBuf::from(value)).filter(|chosen| *chosen != ours)
}

fn accept(chosen: &Path) -> anyhow::Result<()> {
    let problems = verify::torch_folder(chosen);
    if !problems.is_empty() {
        bail!("LIBTORCH={} will not do: {}; try unsetting LIBTORCH", chosen.display(), problems.join("; "));
    }
    eprintln!("LIBTORCH={} holds libtorch {VERSION}: nothing to do", chosen.display());
    Ok(())
}

/// A complete folder in the cache. One with CUDA serves those who do not need it, too.
fn ready(cache: &Path, kind: Kind) -> Option<PathBuf> {
    let kinds = [kind, Kind::Cuda];
    let mut complete =
        kinds.into_iter().filter(|kind| verify::site_folder(&cache.join(kind.folder()), *kind).is_empty());
    complete.next().map(|kind| cache.join(kind.folder()))
}

fn fetch(cache: &Path, kind: Kind, lock: &File) -> anyhow::Result<PathBuf> {
    let python = pip::find_python()?;
    cache::check_room(cache, kind.room())?;
    let ready = cache.join(kind.folder());
    let part = cache.join(format!("{}.part", kind.folder()));
    let site = cache::prepare_part(&part)?;
    let packages = pip::packages(kind);
    eprintln!("fetching libtorch {VERSION} as {} packages with pip: {}", packages.len(), kind.size());
    eprintln!("into {}", ready.display());
    pip::Install { python, packages, part: &part, target: site.clone(), lock }.run()?;
    let problems = verify::site_folder(&site, kind);
    if !problems.is_empty() {
        bail!("pip ended well, but {}; try again after deleting {}", problems.join("; "), part.display());
    }
    pip::try_to_open(python, &site.join("torch/lib/libtorch_cpu.so"))?;
    cache::keep(&site, &ready, &part)?;
    eprintln!("libtorch {VERSION} is ready in {}", ready.display());
    Ok(ready)
}
