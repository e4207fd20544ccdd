//! Why a folder of DeepSpeed cannot be converted.

use std::path::{Path, PathBuf};

use drumline_pickle::TorchFileError;

use super::super::error::CheckpointError;
use super::super::tag::NoTag;

/// Why a checkpoint of DeepSpeed cannot be converted. Nothing was written then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeepSpeedError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] TorchFileError),
    /// A folder or `latest` cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// There is no checkpoint.
    #[error("no checkpoint of DeepSpeed in {}: {what}; try {advice}", dir.display())]
    NotFound {
        /// The folder.
        dir: PathBuf,
        /// What is missing.
        what: String,
        /// What to try.
        advice: String,
    },
    /// The tag cannot be one.
    #[error(transparent)]
    Tag(#[from] NoTag),
    /// A field of a file is missing or is something else.
    #[error("{}: `{field}` is {found}, expected {expected}; try a folder that DeepSpeed's save_checkpoint wrote", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The field, with those around it.
        field: String,
        /// What it is.
        found: String,
        /// What it must be.
        expected: &'static str,
    },
    /// The files of some ranks are missing.
    #[error(
        "{} has the files of {found} ranks, expected {expected}: the others are missing, or are of another save; \
         try copying the folder again, from all nodes",
        dir.display()
    )]
    Incomplete {
        /// The folder.
        dir: PathBuf,
        /// Ranks whose files are there.
        found: usize,
        /// Ranks that saved.
        expected: usize,
    },
    /// What the ranks have saved does not make up the parameters.
    #[error("{}: {what}; try copying the folder again, from all nodes", dir.display())]
    Layout {
        /// The folder.
        dir: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// A checkpoint of a kind that is not converted.
    #[error("{}: {what}; try {advice}", path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// What it is.
        what: String,
        /// What to try.
        advice: &'static str,
    },
    /// The result cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointError),
}

impl DeepSpeedError {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}
