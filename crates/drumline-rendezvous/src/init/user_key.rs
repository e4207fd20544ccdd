//! The key of a job on one machine that nobody was given: rank 0 makes one and leaves it where only its user can read it.
//!
//! ```text
//!  rank 0: random key ─▶ listen ─▶ FOLDER/127.0.0.1-29500-NETNS: key and address ─▶ the other ranks: read it, connect
//! ```
//! `FOLDER` belongs to the user and is closed to others: `$XDG_RUNTIME_DIR/drumline`, or else `drumline-UID` in the
//! folder for temporary files. So another user of the machine can neither join such a job nor disturb it.
//!
//! Whoever listens at an address is its only owner, so rank 0 writes after it has begun to listen and may replace what
//! an earlier run has left there. A rank that has read an old key is not let in, and looks for a new one. The number of
//! the network namespace is in the name, since two of them may share the folder and each have the same address.

use super::InitError;
use crate::JobKey;
use crate::handshake::Hello;
use crate::job_key::random_bytes;
use crate::reminder::Reminder;
use crate::store::error::{StoreError, Tried};
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Pauses between two looks grow from the first to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];
/// Time for somebody on the same machine to take a connection.
const PROBE: Duration = Duration::from_millis(500);
/// Longer than any file of ours.
const MAX_FILE: u64 = 256;

/// Rank 0's file; removed when dropped.
#[derive(Debug)]
pub(super) struct KeyFile(PathBuf);

/// What another rank has read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) key: JobKey,
    /// Where rank 0's store is.
    pub(super) addr: SocketAddr,
}

impl KeyFile {
    /// Leaves `key` for the ranks that were given the address `asked`; the store listens on `addr`.
    pub(super) fn publish(asked: SocketAddr, addr: SocketAddr, key: &JobKey) -> Result<KeyFile, InitError> {
        let mut why = Vec::new();
        for folder in folders() {
            match write_into(&folder, &name_of(asked), key, addr) {
                Ok(path) => return Ok(KeyFile(path)),
                Err(error) => why.push(format!("{}: {error}", folder.display())),
            }
        }
        Err(InitError::KeyFolder { why: why.join(", ") })
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Waits for rank 0's key for one of these addresses. `refused` was read before and is of no use.
pub(super) fn find(
    who: &Hello,
    asked: &[SocketAddr],
    refused: Option<&Found>,
    deadline: Instant,
) -> Result<Found, InitError> {
    let (began, mut tried, mut pause) = (Instant::now(), Tried::default(), PAUSES[0]);
    let mut reminder = Reminder::new(began);
    loop {
        for addr in asked {
            let found = read(*addr)?.filter(|found| Some(found) != refused);
            match (found, probe(*addr)) {
                (Some(found), _) if found.addr != *addr && probe(found.addr).is_ok() => return Ok(found),
                (Some(found), Ok(())) if found.addr == *addr => return Ok(found),
                (_, Ok(())) => tried.note(
                    addr.to_string(),
                    format!("is listened on, and rank 0 has left no key for it in {}", shown(&folders())),
                ),
                (_, Err(error)) => tried.note(addr.to_string(), error),
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let addr = asked.first().map_or_else(String::new, SocketAddr::to_string);
        if left.is_zero() {
            return Err(StoreError::Unreachable { addr, after: began.elapsed(), tried }.into());
        }
        if reminder.is_due(Instant::now()) {
            let waited = began.elapsed();
            tracing::warn!(
                rank = who.rank,
                "{who} still waits for the store at {addr}, {waited:.0?} so far and {left:.0?} more: {tried}"
            );
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 3 / 2).min(PAUSES[1]);
    }
}

/// Whether anybody listens there.
fn probe(addr: SocketAddr) -> Result<(), String> {
    match TcpStream::connect_timeout(&addr, PROBE) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            Err("refused (nobody listens there)".into())
        }
        Err(error) => Err(format!("failed: {error}")),
    }
}

fn read(asked: SocketAddr) -> Result<Option<Found>, InitError> {
    for folder in folders() {
        let path = folder.join(name_of(asked));
        match read_from(&path) {
            Ok(text) => {
                let (key, addr) = text.trim_end().split_once('\n').unwrap_or((&text, ""));
                let addr = addr.parse().unwrap_or(asked);
                return Ok(Some(Found { key: JobKey::from_hex(key)?, addr }));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                return Err(InitError::KeyFolder { why: format!("{}: {error}", path.display()) });
            }
        }
    }
    Ok(None)
}

/// The text of a file that belongs to this user and is closed to others, in such a folder.
fn read_from(path: &Path) -> io::Result<Zeroizing<String>> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let folder = open_folder(folder)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(&folder, name, flags, Mode::empty())?);
    check_private(&file.metadata()?)?;
    let mut text = Zeroizing::new(String::new());
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

/// Written beside and then renamed: whoever reads finds a whole file, and one that was there is replaced.
fn write_into(folder: &Path, name: &str, key: &JobKey, addr: SocketAddr) -> io::Result<PathBuf> {
    let dir = match open_folder(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            match rustix::fs::mkdir(folder, Mode::RWXU) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            open_folder(folder)?
        }
        other => other?,
    };
    let mut random = [0; 8];
    random_bytes(&mut random);
    let beside = format!(".{name}.{:016x}", u64::from_le_bytes(random));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(&dir, &beside, flags, Mode::RUSR | Mode::WUSR)?);
    let text = Zeroizing::new(format!("{}\n{addr}\n", *key.to_hex()));
    let written = file.write_all(text.as_bytes());
    let written = written.and_then(|()| Ok(rustix::fs::renameat(&dir, &beside, &dir, name)?));
    if let Err(error) = written {
        let _ = rustix::fs::unlinkat(&dir, &beside, rustix::fs::AtFlags::empty());
        return Err(error);
    }
    Ok(folder.join(name))
}

/// A folder that belongs to this user and is closed to others; a link is none.
fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
    check_private(&File::from(dir.try_clone()?).metadata()?)?;
    Ok(dir)
}

fn check_private(meta: &std::fs::Metadata) -> io::Result<()> {
    let (mode, owner) = (meta.mode() & 0o7777, meta.uid());
    if mode & 0o077 == 0 && owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let what = format!("it belongs to uid {owner} and has mode {mode:04o}, expected this user and no others");
    Err(io::Error::new(ErrorKind::PermissionDenied, what))
}

/// Where rank 0 may leave its key, the best place first. The others look in all of them: they may have other variables.
fn folders() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let own =
        |base: &PathBuf| std::fs::symlink_metadata(base).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
    let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|base| base.is_absolute());
    let runtime = given.into_iter().chain([PathBuf::from(format!("/run/user/{uid}"))]).filter(own);
    let temporary = [std::env::temp_dir(), PathBuf::from("/tmp")];
    let temporary = temporary.into_iter().map(|base| base.join(format!("drumline-{uid}")));
    let mut folders: Vec<_> = runtime.map(|base| base.join("drumline")).chain(temporary).collect();
    let mut seen = std::collections::HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

fn shown(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(" or ")
}

/// `127.0.0.1-29500-4026531840`.
fn name_of(addr: SocketAddr) -> String {
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let digits: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    format!("{}-{}-{digits}", addr.ip(), addr.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn addr() -> SocketAddr {
        "127.0.0.1:29500".parse().unwrap()
    }

    #[test]
    fn a_key_comes_back_and_replaces_what_was_there() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("drumline");
        for _ in 0..2 {
            let key = JobKey::random();
            let path = write_into(&folder, "name", &key, addr()).unwrap();
            let text = read_from(&path).unwrap();
            assert_eq!(*text, format!("{}\n{}\n", *key.to_hex(), addr()));
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing beside it");
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn folders_and_files_that_others_could_have_made_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("drumline");
        let path = write_into(&folder, "name", &JobKey::random(), addr()).unwrap();
        let link = base.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(write_into(&link, "name", &JobKey::random(), addr()).is_err(), "a link");
        symlink(&path, folder.join("other")).unwrap();
        assert!(read_from(&folder.join("other")).is_err(), "a link");
        let open =
            |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        open(&path, 0o640);
        let error = read_from(&path).unwrap_err().to_string();
        assert!(error.contains("has mode 0640"), "{error}");
        open(&path, 0o600);
        read_from(&path).expect("control: closed again");
        open(&folder, 0o750);
        assert!(read_from(&path).is_err() && write_into(&folder, "x", &JobKey::random(), addr()).is_err());
    }
}
