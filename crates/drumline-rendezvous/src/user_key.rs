//! The key of a job on one machine that nobody was given: whoever hosts the store makes one and leaves it where only its
//! user can read it.
//!
//! ```text
//!  host: random key ─▶ listen ─▶ FOLDER/127.0.0.1-29500-NETNS: key and address ─▶ the others: read it, connect
//! ```
//! The host is rank 0, or among launchers the first agent. `FOLDER` belongs to the user and is closed to others:
//! `$XDG_RUNTIME_DIR/drumline` and `/tmp/drumline-UID`, or else `drumline-UID` in the folder for temporary files. So
//! another user of the machine can neither join such a job nor disturb it.
//!
//! Whoever listens at an address is its only owner, so the host writes after it has begun to listen and may replace what
//! an earlier run has left there. Whoever has read an old key is not let in, and looks for a new one. The number of
//! the network namespace is in the name, since two of them may share the folder and each have the same address.

use crate::handshake::{HandshakeError, Hello};
use crate::init::InitError;
use crate::job_key::{JobKey, random_bytes};
use crate::reminder::Reminder;
use crate::store::error::{StoreError, Tried};
use crate::store::tcp::TcpStore;
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
/// A host leaves its key a moment after it has begun to listen. Whoever has listened for so long without one is somebody
/// else, or the store of an earlier run that does not end. (That one waits 30 s for its own ranks.)
const STRANGER: Duration = Duration::from_secs(45);

/// The host's key in the folders of its user; removed when dropped.
#[derive(Debug)]
pub struct KeyFile(Vec<PathBuf>);

/// A store that was reached with the key its host had left.
#[derive(Debug)]
pub struct Joined {
    /// The store.
    pub store: TcpStore,
    /// The key.
    pub key: JobKey,
}

/// What was read in one folder.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    key: JobKey,
    /// Where the store is.
    addr: SocketAddr,
}

impl KeyFile {
    /// Leaves `key` for those who were given one of the addresses `asked`; the store listens on `addr`.
    pub fn publish(asked: &[SocketAddr], addr: SocketAddr, key: &JobKey) -> Result<KeyFile, InitError> {
        // Those who were given a name look for each of its addresses.
        let asked = asked.iter().find(|asked| asked.ip() == addr.ip()).copied().unwrap_or(addr);
        let (mut files, mut why) = (KeyFile(Vec::new()), Vec::new());
        // In each of them, since the others may have other variables.
        let shared = shared_folders();
        for folder in folders() {
            if !shared.contains(&folder) && !files.0.is_empty() {
                break;
            }
            match write_into(&folder, &name_of(asked), key, addr) {
                Ok(path) => files.0.push(path),
                Err(error) => why.push(format!("{}: {error}", folder.display())),
            }
        }
        if files.0.is_empty() { Err(InitError::KeyFolder { why: why.join(", ") }) } else { Ok(files) }
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Waits for the key that the host has left for one of these addresses, and connects with it. A key of an earlier run is
/// not the one that the server has: then a new one is waited for.
pub fn join(hello: &Hello, asked: &[SocketAddr], deadline: Instant) -> Result<Joined, InitError> {
    let mut refused: Vec<Found> = Vec::new();
    let mut last = None;
    loop {
        let found = match (find(hello, asked, &refused, deadline), last) {
            (Ok(found), _) => found,
            (Err(_), Some(error)) => return Err(error),
            (Err(error), None) => return Err(error),
        };
        match TcpStore::connect(&found.addr.to_string(), &found.key, hello.clone(), deadline) {
            Ok(store) => return Ok(Joined { store, key: found.key }),
            Err(
                error @ StoreError::Handshake {
                    source: HandshakeError::Closed | HandshakeError::NotProved,
                    ..
                },
            ) => {
                refused.push(found);
                last = Some(error.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits for a key for one of these addresses. Those `refused` were read before and are of no use.
fn find(who: &Hello, asked: &[SocketAddr], refused: &[Found], deadline: Instant) -> Result<Found, InitError> {
    let (began, mut tried, mut pause) = (Instant::now(), Tried::default(), PAUSES[0]);
    let mut reminder = Reminder::new(began);
    let mut listened_since = None;
    loop {
        let mut is_listened_on = false;
        for addr in asked {
            let folders = folders();
            let Looked { found, faults } = look(&folders, *addr)?;
            let mut found = found.into_iter().filter(|found| !refused.contains(found));
            let reached = probe(*addr);
            let alive = |found: &Found| {
                if found.addr == *addr { reached.is_ok() } else { probe(found.addr).is_ok() }
            };
            if let Some(found) = found.find(alive) {
                return Ok(found);
            }
            is_listened_on |= reached.is_ok();
            let outcome = reached.err().unwrap_or_else(|| {
                let passed_over: String = faults.iter().map(|fault| format!(" ({fault})")).collect();
                let places = shown(&folders);
                format!("is listened on, and rank 0 has left no key for it in {places}{passed_over}")
            });
            tried.note(addr.to_string(), outcome);
        }
        let now = Instant::now();
        listened_since = listened_since.filter(|_| is_listened_on).or(is_listened_on.then_some(now));
        let is_strangers = listened_since.is_some_and(|since| now.duration_since(since) >= STRANGER);
        let left = deadline.saturating_duration_since(now);
        let addr = asked.first().map_or_else(String::new, SocketAddr::to_string);
        if left.is_zero() || is_strangers {
            return Err(StoreError::Unreachable { addr, after: began.elapsed(), tried }.into());
        }
        if reminder.is_due(now) {
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

/// What the folders hold for one address.
#[derive(Debug, Default)]
struct Looked {
    found: Vec<Found>,
    /// Folders and files that others could have made, which are passed over.
    faults: Vec<String>,
}

/// The keys for this address, of all folders in which one may lie; an error if none of these can be trusted.
fn look(folders: &[PathBuf], asked: SocketAddr) -> Result<Looked, InitError> {
    let mut looked = Looked::default();
    for folder in folders {
        let path = folder.join(name_of(asked));
        match read_from(&path) {
            Ok(text) => {
                let (key, addr) = text.trim_end().split_once('\n').unwrap_or((&text, ""));
                let addr = addr.parse().unwrap_or(asked);
                looked.found.push(Found { key: JobKey::from_hex(key)?, addr });
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => looked.faults.push(format!("{}: {error}", path.display())),
        }
    }
    if looked.faults.len() == folders.len() {
        return Err(InitError::KeyFolder { why: looked.faults.join(", ") });
    }
    Ok(looked)
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

/// Where a key may lie.
fn folders() -> Vec<PathBuf> {
    let mut folders = shared_folders();
    folders.push(temporary_folder());
    let mut seen = std::collections::HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// The folders in which all processes of this user look, whatever their variables say, the best one first.
fn shared_folders() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let own =
        |base: &PathBuf| std::fs::symlink_metadata(base).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
    let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|base| base.is_absolute());
    let runtime = given.into_iter().chain([PathBuf::from(format!("/run/user/{uid}"))]).filter(own);
    runtime.map(|base| base.join("drumline")).chain([PathBuf::from(format!("/tmp/drumline-{uid}"))]).collect()
}

/// The folder for those who can write nowhere else.
fn temporary_folder() -> PathBuf {
    std::env::temp_dir().join(format!("drumline-{}", rustix::process::geteuid().as_raw()))
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
        let others = base.path().join("others");
        let good = write_into(&others, &name_of(addr()), &JobKey::random(), addr()).unwrap();
        let folders = [folder.clone(), others];
        let looked = look(&folders, addr()).unwrap();
        assert_eq!(
            (looked.found.len(), looked.faults.len()),
            (1, 1),
            "one that cannot be trusted hides no other"
        );
        std::fs::remove_file(good).unwrap();
        assert!(look(&folders, addr()).unwrap().found.is_empty());
        assert!(look(&folders[..1], addr()).is_err(), "none can be trusted");
        assert!(read_from(&path).is_err() && write_into(&folder, "x", &JobKey::random(), addr()).is_err());
    }
}
