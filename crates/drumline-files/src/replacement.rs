//! A file that takes its place once it is complete.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, IntoInnerError, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// What a written file survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The end of the process. A crash of the machine may bring the old file back, or an empty one.
    Process,
    /// A crash of the machine: the bytes are on the disk before the name is, and the name before the call returns.
    Disk,
}

/// Writes `bytes` to `path`; see [`Replacement`].
pub fn replace(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>, durability: Durability) -> io::Result<()> {
    let mut file = Replacement::new(path)?;
    file.write_all(bytes.as_ref())?;
    file.commit(durability)
}

/// A file that is written beside its place and then renamed. Dropped before [`commit`](Self::commit) it leaves nothing
/// behind, and what was there stays.
///
/// - A file that was there gives its permissions to the new one; a new file has those that the user's umask allows.
/// - A link stays a link: the file that it leads to is replaced.
/// - What is there and is no file (a folder, a device) is an error, and stays.
#[derive(Debug)]
pub struct Replacement {
    /// Where the file will be.
    path: PathBuf,
    part: Part,
    file: BufWriter<File>,
}

impl Replacement {
    /// Begins to write the file at `path`. Its folder must exist.
    pub fn new(path: impl AsRef<Path>) -> io::Result<Self> {
        // Beside what a link leads to; a link that leads nowhere is replaced itself.
        let path = fs::canonicalize(&path).unwrap_or_else(|_| path.as_ref().to_owned());
        let permissions = match fs::symlink_metadata(&path) {
            Ok(there) if there.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            Ok(there) if there.is_file() => Some(there.permissions()),
            Ok(there) if there.is_symlink() => None,
            Ok(_) => {
                return Err(io::Error::new(
                    ErrorKind::InvalidInput,
                    "this is a device or a pipe, not a file",
                ));
            }
            Err(_) => None,
        };
        let (part, file) = Part::beside(&path)?;
        if let Some(permissions) = permissions {
            file.set_permissions(permissions)?;
        }
        Ok(Self { path, part, file: BufWriter::new(file) })
    }

    /// Renames the file to its final name.
    pub fn commit(mut self, durability: Durability) -> io::Result<()> {
        let file = self.file.into_inner().map_err(IntoInnerError::into_error)?;
        if durability == Durability::Disk {
            file.sync_all()?;
        }
        self.part.rename(&self.path)?;
        if durability == Durability::Disk {
            File::open(folder_of(&self.path))?.sync_all()?;
        }
        Ok(())
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for Replacement {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// The file beside, which goes when this is dropped, unless it was renamed.
#[derive(Debug)]
struct Part(Option<PathBuf>);

impl Part {
    /// Makes a file that nobody else has: not another thread, not another process, not one of another machine.
    fn beside(path: &Path) -> io::Result<(Self, File)> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = path.file_name().ok_or_else(|| io::Error::from(ErrorKind::InvalidInput))?;
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let mut part = OsString::from(".");
            part.push(name);
            part.push(format!(".{}.{number}.part", std::process::id()));
            let part = folder_of(path).join(part);
            match OpenOptions::new().write(true).create_new(true).open(&part) {
                // Left behind by a process with our number, or of another machine.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                opened => return Ok((Self(Some(part)), opened?)),
            }
        }
    }

    fn rename(&mut self, to: &Path) -> io::Result<()> {
        if let Some(part) = &self.0 {
            fs::rename(part, to)?;
        }
        self.0 = None;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(part) = &self.0 {
            // It may be gone, or the disk may be: nothing can be done about either here.
            let _ = fs::remove_file(part);
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_is_replaced_whole_and_keeps_its_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        for (text, durability) in [("one", Durability::Process), ("two", Durability::Disk)] {
            replace(&path, text, durability).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let ordinary = folder.path().join("ordinary");
        fs::write(&ordinary, "").unwrap();
        assert_eq!(mode(&path), mode(&ordinary), "a new file is as any other");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        replace(&path, "three", Durability::Process).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(names(folder.path()), ["a.txt", "ordinary"]);
    }

    #[test]
    fn what_is_not_committed_is_never_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        fs::write(&path, "old").unwrap();
        let mut file = Replacement::new(&path).unwrap();
        file.write_all(b"new").unwrap();
        file.flush().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()).len(), 2, "the control: it is being written");
        drop(file);
        assert_eq!(names(folder.path()), ["a.txt"]);
    }

    #[test]
    fn two_writers_of_one_file_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let [mut first, mut second] = [(); 2].map(|()| Replacement::new(&path).unwrap());
        first.write_all(b"first").unwrap();
        second.write_all(b"second").unwrap();
        second.commit(Durability::Process).unwrap();
        first.commit(Durability::Process).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        assert_eq!(names(folder.path()), ["a.txt"]);
    }

    #[test]
    fn a_link_stays_one() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        symlink("file", &link).unwrap();
        replace(&link, "new", Durability::Process).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    }

    #[test]
    fn what_is_no_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let kind = |path: &Path| replace(path, "x", Durability::Process).unwrap_err().kind();
        assert_eq!(kind(folder.path()), ErrorKind::IsADirectory);
        assert_eq!(kind(Path::new("/dev/null")), ErrorKind::InvalidInput);
        assert_eq!(kind(&folder.path().join("missing/a.txt")), ErrorKind::NotFound);
        let missing = replace(folder.path().join("missing/a.txt"), "x", Durability::Process).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "No such file or directory (os error 2)",
            "errors name no other path"
        );
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_written_header_can_be_corrected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let mut file = Replacement::new(&path).unwrap();
        file.write_all(b"0 lines").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(b"9").unwrap();
        file.commit(Durability::Disk).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "9 lines");
    }
}
