//! Atomic file writes: to a temporary file in the same folder, which is then renamed.

use crate::TextError;
use drumline_files::{Durability, replace};
use std::path::Path;

/// Replaces a file. Readers see the old content or the new one, never a part of it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TextError> {
    let failed = |source| TextError::WriteFile { path: path.to_owned(), source };
    replace(path, bytes, Durability::Process).map_err(failed)
}

/// Writes a new file. It is an error if the file exists with different content, which may be somebody's data.
pub(crate) fn write_once(path: &Path, bytes: &[u8]) -> Result<(), TextError> {
    match std::fs::read(path) {
        Ok(found) if found == bytes => Ok(()),
        Ok(_) => Err(TextError::AlreadyExists { path: path.to_owned() }),
        Err(_) => write_whole(path, bytes),
    }
}
