//! Writing a file whole or not at all: beside its place first, then renamed.

use crate::TextError;
use std::io::Write;
use std::path::Path;

/// Readers see the old file or the new one, never a part.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TextError> {
    let failed = |source| TextError::WriteFile { path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().permissions(readable()).tempfile_in(folder).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// The same, but what is there and differs is somebody's data.
pub(crate) fn write_once(path: &Path, bytes: &[u8]) -> Result<(), TextError> {
    match std::fs::read(path) {
        Ok(there) if there == bytes => Ok(()),
        Ok(_) => Err(TextError::InTheWay { path: path.to_owned() }),
        Err(_) => write_whole(path, bytes),
    }
}

/// For all, less the user's umask, as for any new file; a temporary one would be for its owner alone.
pub(crate) fn readable() -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o666)
}
