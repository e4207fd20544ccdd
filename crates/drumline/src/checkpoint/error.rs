//! Errors of checkpoints. A failed save leaves the earlier checkpoints and the group unchanged.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use drumline_comm::{CommError, ShapeError};
use drumline_torch::TorchError;

use super::index::IndexError;
use super::load::Refused;
use super::safetensors::SafetensorsError;

/// Why a checkpoint could not be saved, loaded or restored into a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Writing failed.
    #[error("cannot save a checkpoint: {}: {source}{}", path.display(), advice(source))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The folder of checkpoints cannot be listed.
    #[error("cannot look for checkpoints in {}: {source}", path.display())]
    Search {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The work of rank 0 for all ranks failed; this is another rank.
    #[error("on rank 0: {cause}")]
    OnRankZero {
        /// Its error.
        cause: String,
    },
    /// A rank could not write its part of a checkpoint; this is another rank.
    #[error("on rank {rank}: {cause}")]
    OnRank {
        /// The rank.
        rank: usize,
        /// Its error.
        cause: String,
    },
    /// Ranks that write their own parts do not see the same folder.
    #[error(
        "cannot save a checkpoint: rank 0 and rank {rank} do not both see {}, with the same contents; \
         try a folder on a disk that all ranks share",
        path.display()
    )]
    NotShared {
        /// The file or folder.
        path: PathBuf,
        /// The rank that writes to it.
        rank: usize,
    },
    /// A rank cannot read a file of a checkpoint that rank 0 has found.
    #[error(
        "cannot load the checkpoint {}: on rank {rank}, {reason}; nothing was changed; \
         try a folder on a disk that all ranks share",
        path.display()
    )]
    NotSeen {
        /// Its folder.
        path: PathBuf,
        /// The rank.
        rank: usize,
        /// Why.
        #[source]
        reason: Refusal,
    },
    /// The ranks have different states.
    #[error("ranks disagree on what to save:{}; try saving at the same step on all ranks", list(differences))]
    Disagreement {
        /// What differs, and how.
        differences: Vec<String>,
    },
    /// A tensor cannot be saved.
    #[error("cannot save tensor `{name}`: {cause}")]
    Tensor {
        /// Its name.
        name: String,
        /// Why not.
        cause: String,
    },
    /// Files do not make up global tensors, or a region is outside of its tensor.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The mesh of the state does not match the number of ranks.
    #[error("cannot save a checkpoint: {0}")]
    Mesh(#[from] ShapeError),
    /// There is no memory for a tensor, or libtorch does not have its type.
    #[error(transparent)]
    Tensors(#[from] SafetensorsError),
    /// A checkpoint cannot be read, but is not known to be damaged. Falling back to an older one would lose steps.
    #[error("cannot load the checkpoint {}: {reason}; nothing was changed; {}", path.display(), reason.advice())]
    Unreadable {
        /// Its folder.
        path: PathBuf,
        /// Why.
        #[source]
        reason: Refusal,
    },
    /// A program that only reads the checkpoints has tried to save one.
    #[error("the checkpoints in {} are only read here, not saved; try Checkpoints::new without read_only()", dir.display())]
    ReadOnly {
        /// The folder.
        dir: PathBuf,
    },
    /// There are checkpoints, but all of them are damaged.
    #[error(
        "no checkpoint in {} can be used:{}; nothing was changed; try another folder, or an empty one for a new run",
        dir.display(),
        list(refused)
    )]
    NoneUsable {
        /// The folder.
        dir: PathBuf,
        /// Each checkpoint with the reason.
        refused: Vec<Refused>,
    },
    /// The requested checkpoint is damaged.
    #[error(
        "{0}; try resuming the run, which replaces it by the next best, or the weights of another checkpoint"
    )]
    Unusable(#[from] Refused),
    /// The checkpoint's tensors do not match the model's.
    #[error(
        "the checkpoint is of another model:{}; try the model that it was saved from, or another folder",
        list(differences)
    )]
    Mismatch {
        /// What is missing, not expected, or of another shape.
        differences: Vec<String>,
    },
    /// The checkpoint was saved with another optimizer.
    #[error(
        "the checkpoint's optimizer is `{saved}`, this run's is `{wanted}`; try the same optimizer, or load the weights alone"
    )]
    OtherOptimizer {
        /// The checkpoint's.
        saved: String,
        /// This run's.
        wanted: String,
    },
    /// libtorch returned an error.
    #[error(transparent)]
    Torch(Box<TorchError>),
    /// Communication between ranks failed.
    #[error(transparent)]
    Comm(Box<CommError>),
}

impl From<TorchError> for CheckpointError {
    fn from(error: TorchError) -> Self {
        Self::Torch(Box::new(error))
    }
}

impl From<CommError> for CheckpointError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl CheckpointError {
    /// Converts the system's error in writing `path`.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }

    /// Converts an error in writing a file of tensors.
    pub(super) fn of_file(path: &Path) -> impl FnOnce(SafetensorsError) -> Self {
        let path = path.to_owned();
        move |error| match error {
            SafetensorsError::Io(source) => Self::Write { path, source },
            SafetensorsError::Unsavable { name, cause } => Self::Tensor { name, cause },
            error => Self::Tensors(error),
        }
    }

    /// Whether a new group may succeed: a process was lost, and nobody made a mistake.
    pub fn is_recoverable(&self) -> bool {
        self.comm_error().is_some_and(CommError::is_recoverable)
    }

    /// The error of the group, if it is one.
    pub fn comm_error(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error) => Some(error),
            Self::Torch(error) => error.comm_error(),
            _ => None,
        }
    }
}

/// Why one checkpoint is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A file is not there or cannot be read.
    #[error("{file} cannot be read: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A newer or unknown program wrote it.
    #[error("it has format version {found}, this program reads versions 1 and 2")]
    Version {
        /// The version it has.
        found: String,
    },
    /// There is no memory for its tensors, or this program does not know their type.
    #[error("{file} cannot be loaded: {cause}")]
    Tensors {
        /// The file.
        file: String,
        /// What libtorch said.
        cause: String,
    },
    /// A file has changed since it was written.
    #[error("{file} is damaged: {what}")]
    Damaged {
        /// The file.
        file: String,
        /// What was found.
        what: String,
    },
}

impl Refusal {
    pub(super) fn unreadable(file: &str) -> impl FnOnce(io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Unreadable { file, source }
    }

    /// Whether bytes are missing or wrong, so that the checkpoint is lost. Other reasons may pass: another user, more
    /// memory or another program may be able to read it.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Damaged { .. } => true,
            Self::Version { .. } | Self::Tensors { .. } => false,
            Self::Unreadable { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::IsADirectory
            ),
        }
    }

    /// What the user can do if it is not damage.
    fn advice(&self) -> &'static str {
        match self {
            Self::Unreadable { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => {
                    "try the user who saved it, or `chmod -R u+rX` on its folder"
                }
                io::ErrorKind::OutOfMemory => MORE_MEMORY,
                _ => "try again; to resume from an older one, rename its folder",
            },
            Self::Tensors { .. } => MORE_MEMORY,
            _ => "try the version of Drumline that saved it; to resume from an older one, rename its folder",
        }
    }

    /// Converts the error of a file.
    pub(super) fn of_file(file: &str) -> impl FnOnce(SafetensorsError) -> Self {
        let file = file.to_owned();
        move |error| match error {
            SafetensorsError::Io(source) => Self::Unreadable { file, source },
            error if error.is_malformed() => Self::damaged(&file, &error),
            error => Self::tensors(&file, &error),
        }
    }

    pub(super) fn tensors(file: &str, cause: &impl fmt::Display) -> Self {
        Self::Tensors { file: file.to_owned(), cause: cause.to_string() }
    }

    pub(super) fn damaged(file: &str, what: &impl fmt::Display) -> Self {
        Self::Damaged { file: file.to_owned(), what: what.to_string() }
    }
}

const MORE_MEMORY: &str = "try with more memory (`ulimit -v`, or the limit of the job or container)";

/// What the user can do about it.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; try freeing space there, keeping fewer checkpoints, or another folder"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "; try a folder that can be written to"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => "; try a folder that is not a file",
        _ => "",
    }
}

/// How many lines of a list an error shows.
const LISTED: usize = 8;

fn list(lines: &[impl ToString]) -> String {
    let mut text: String =
        lines.iter().take(LISTED).map(|line| format!("\n  {}", line.to_string())).collect();
    if lines.len() > LISTED {
        text.push_str(&format!("\n  and {} more", lines.len() - LISTED));
    }
    text
}
