//! Why a file cannot be read.

use std::path::{Path, PathBuf};

/// Why a file of PyTorch cannot be read. The message begins with the path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchFileError {
    /// The system cannot read it.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// It is not the archive that `torch.save` writes.
    #[error("{}: {source}", path.display())]
    Zip {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: ZipError,
    },
    /// Its pickle is malformed, or has what this reader refuses.
    #[error("{}: {source}", path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: PickleError,
    },
    /// A tensor's elements are not in the file.
    #[error("{}: the elements of a tensor are not there: `data/{key}` {what}", path.display())]
    Storage {
        /// The file.
        path: PathBuf,
        /// The name of the storage.
        key: String,
        /// What is wrong.
        what: String,
    },
}

impl TorchFileError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn zip(path: &Path) -> impl FnOnce(ZipError) -> Self {
        let path = path.to_owned();
        move |error| match error {
            ZipError::Io(source) => Self::Io { path, source },
            source => Self::Zip { path, source },
        }
    }
}

/// Why a file is not an archive of `torch.save`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZipError {
    /// The system cannot read it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It has no end of an archive.
    #[error(
        "it is not a zip archive, or it is cut short; if a PyTorch before 1.6 wrote it, try torch.load and torch.save with \
         a newer one"
    )]
    NotAnArchive,
    /// A field is impossible.
    #[error("its {what} is impossible for a file of {len} bytes: the file is damaged")]
    Impossible {
        /// The field.
        what: &'static str,
        /// The length of the file.
        len: u64,
    },
    /// An entry is compressed or encrypted.
    #[error("`{name}` is compressed or encrypted in it, which torch.save never does")]
    NotStored {
        /// The entry.
        name: String,
    },
    /// It has no entry of this name.
    #[error("it has no `{name}`; try a file that torch.save wrote")]
    Missing {
        /// The end of the name.
        name: &'static str,
    },
    /// An entry is larger than this reader accepts.
    #[error("`{name}` has {len} bytes in it, of which at most {limit} are read")]
    TooLarge {
        /// The entry.
        name: String,
        /// Its length.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// The elements are not in the byte order of this machine.
    #[error("its numbers are `{order}`-endian, expected little-endian")]
    ByteOrder {
        /// What it says.
        order: String,
    },
    /// The bytes of an entry have changed.
    #[error("`{name}` is damaged in it: its checksum is {found:08x}, expected {expected:08x}")]
    Checksum {
        /// The entry.
        name: String,
        /// The checksum in the archive.
        expected: u32,
        /// The checksum of its bytes.
        found: u32,
    },
}

/// Why a pickle cannot be read. `at` is the position of the operation in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// It ends before it is complete.
    #[error("its pickle ends after byte {at}, in the middle of an operation")]
    Truncated {
        /// The position.
        at: usize,
    },
    /// An operation that torch.save does not write.
    #[error(
        "its pickle has the operation {opcode:#04x} at byte {at}, which is refused: torch.save does not write it"
    )]
    Refused {
        /// The position.
        at: usize,
        /// The operation's byte.
        opcode: u8,
    },
    /// An operation finds something else than it needs.
    #[error("its pickle is malformed at byte {at}: {what}")]
    Malformed {
        /// The position.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// It builds more objects than this reader accepts.
    #[error("its pickle builds more than {limit} objects, which is refused")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// It is longer than this reader accepts.
    #[error("its pickle has {len} bytes, of which at most {limit} are read")]
    TooLong {
        /// Its length.
        len: usize,
        /// The limit.
        limit: usize,
    },
}
