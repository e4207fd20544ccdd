//! The same training, as often as wanted: its programs, its data, its command line.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bench::{DRUMLINE, DRUMLINE_TRAIN, release};
use crate::workspace;

/// What is run.
pub(crate) struct Programs {
    pub(super) drumline: PathBuf,
    pub(super) train: PathBuf,
}

impl Programs {
    /// Those in a folder, or else built now.
    pub(crate) fn find(folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else {
            let [drumline, train] = release([DRUMLINE, DRUMLINE_TRAIN])?;
            return Ok(Self { drumline, train });
        };
        let found = |name: &str| folder.join(name).canonicalize().with_context(|| format!("no {name} there"));
        Ok(Self { drumline: found(DRUMLINE.name)?, train: found(DRUMLINE_TRAIN.name)? })
    }
}

/// How long a training is, and on how many ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) num_steps: usize,
    /// Steps from one checkpoint to the next.
    pub(crate) save_every: usize,
    pub(crate) ranks_per_host: usize,
}

/// A training of `config/gpt-tiny.yaml`.
pub(crate) struct Recipe {
    pub(super) programs: Programs,
    pub(super) folder: PathBuf,
    pub(super) size: Size,
}

impl Recipe {
    /// Makes data and a key in a fresh folder.
    pub(crate) fn prepare(programs: Programs, folder: &Path, size: Size) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(folder)?;
        let recipe = Self { programs, folder: folder.to_owned(), size };
        recipe.data(&["synth-story", "--out", ".", "--train", "400", "--valid", "6"])?;
        recipe.data(&["tokens", "train.txt", "--out", "train.tokens"])?;
        recipe.data(&["tokens", "valid.txt", "--out", "valid.tokens"])?;
        let mut key = File::options().write(true).create_new(true).mode(0o600).open(recipe.key())?;
        key.write_all("5a".repeat(32).as_bytes())?;
        Ok(recipe)
    }

    fn data(&self, words: &[&str]) -> Result<()> {
        let mut command = Command::new(&self.programs.train);
        let output = command.arg("data").args(words).current_dir(&self.folder).output()?;
        ensure!(output.status.success(), "no data: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    pub(crate) fn num_steps(&self) -> usize {
        self.size.num_steps
    }

    pub(crate) fn ranks_per_host(&self) -> usize {
        self.size.ranks_per_host
    }

    /// Where the run of this name has its files.
    pub(crate) fn run_folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub(super) fn key(&self) -> PathBuf {
        self.folder.join("key")
    }

    /// The words behind `drumline-train`.
    pub(super) fn args(&self, out: &Path) -> Vec<String> {
        let cfg = workspace::root().join("config/gpt-tiny.yaml");
        let [train, dev] = ["train.tokens", "valid.tokens"].map(|name| self.folder.join(name));
        let files = [("--cfg", &*cfg), ("OUT_DIR", out), ("GPT.TRAIN", &*train), ("GPT.DEV", &*dev)];
        let keys = [
            ("TRAIN.MAX_STEPS", self.size.num_steps.to_string()),
            ("TRAIN.SAVE_FREQ", self.size.save_every.to_string()),
            ("OPTIM.MAX_EPOCH", "100".to_owned()),
            ("TRAIN.TENSORBOARD", "false".to_owned()),
        ];
        let files = files.into_iter().map(|(name, path)| (name, path.display().to_string()));
        let pairs = files.chain(keys).flat_map(|(name, value)| [name.to_owned(), value]);
        std::iter::once("train".to_owned()).chain(pairs).collect()
    }
}
