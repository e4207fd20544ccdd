//! The key of a job on one machine that was given none: the host of the store creates one, and leaves it where only its
//! user can read it.
//!
//! ```text
//!  host: random key ─▶ listen ─▶ FOLDER/127.0.0.1-29500-NETNS-JOB: key and address ─▶ the others: read it, connect
//! ```
//! The host is rank 0, or among launchers the first agent. `FOLDER` belongs to the user and is closed to others:
//! `$XDG_RUNTIME_DIR/drumline` and `/tmp/drumline-UID`, or else `drumline-UID` in the folder for temporary files. So
//! another user of the machine can neither join such a job nor disturb it.
//!
//! The process that listens on an address is its only owner. So the host writes the key after it has begun to listen,
//! and may replace a key that an earlier run has left. A rank that has read an old key is not admitted, and looks for a
//! new one. The number of the network namespace is in the file's name, since two namespaces may share the folder and
//! each have the same address. If the port is derived from the job's number, two jobs may derive the same one, and the
//! second host listens on another port. So the job is in the name, too.

use crate::handshake::{HandshakeError, Hello};
use crate::init::InitError;
use crate::job_key::{JobKey, random_bytes};
use crate::reminder::Reminder;
use crate::store::error::{StoreError, Tried};
use crate::store::tcp::TcpStore;
use rustix::fs::{CWD, Mode, OFlags};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zeroize::Zeroizing;

/// Pauses between two checks grow from the first to the second value.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];
/// Time limit for connecting to a server on the same machine.
const PROBE: Duration = Duration::from_millis(500);
/// Longer than any file of ours.
const MAX_FILE: u64 = 256;
/// A host writes its key just after it has begun to listen. A process that has listened for this long without one is
/// another program, or the store of an earlier run that does not end. (That one waits 30 s for its own ranks.)
const OTHER_SERVER: Duration = Duration::from_secs(45);

/// Where the ranks of this machine should find the store.
#[derive(Debug, Clone, Copy)]
pub struct MeetingPlace<'a> {
    /// The addresses of the store, all of the same port.
    pub addrs: &'a [SocketAddr],
    /// The job from whose name the port is derived; `None` if the user chose the port, which then identifies the job.
    pub job: Option<&'a str>,
}

/// The host's key in the folders of its user; removed when dropped.
#[derive(Debug)]
pub struct KeyFile {
    paths: Vec<PathBuf>,
    content: Content,
}

/// A store that was reached with the key that its host had left.
#[derive(Debug)]
pub struct Joined {
    /// The store.
    pub store: TcpStore,
    /// The key.
    pub key: JobKey,
}

/// The content of a key file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Content {
    key: JobKey,
    /// The address of the store.
    addr: SocketAddr,
}

impl Content {
    fn to_text(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("{}\n{}\n", *self.key.to_hex(), self.addr))
    }

    /// Parses a file for the address `asked`.
    fn from_text(text: &str, asked: SocketAddr) -> Result<Content, InitError> {
        let (key, addr) = text.trim_end().split_once('\n').unwrap_or((text, ""));
        Ok(Content { key: JobKey::from_hex(key)?, addr: addr.parse().unwrap_or(asked) })
    }
}

impl KeyFile {
    /// Leaves `key` for the ranks that look at this `place`; the store listens on `addr`.
    pub fn publish(place: MeetingPlace<'_>, addr: SocketAddr, key: &JobKey) -> Result<KeyFile, InitError> {
        // Ranks that were given a name look for each of its addresses.
        let at = place.addrs.iter().find(|asked| asked.ip() == addr.ip()).copied().unwrap_or(addr);
        let name = name_of(at, place.job);
        let mut files = KeyFile { paths: Vec::new(), content: Content { key: key.clone(), addr } };
        let mut why = Vec::new();
        // Write it to each folder, since the other ranks may have other variables.
        let shared = shared_folders();
        for folder in folders() {
            if !shared.contains(&folder) && !files.paths.is_empty() {
                break;
            }
            match write_into(&folder, &name, &files.content) {
                Ok(path) => files.paths.push(path),
                Err(error) => why.push(format!("{}: {error}", folder.display())),
            }
        }
        if files.paths.is_empty() { Err(InitError::KeyFolder { why: why.join(", ") }) } else { Ok(files) }
    }
}

impl Drop for KeyFile {
    /// Removes the files, except those that another host has replaced since.
    fn drop(&mut self) {
        let ours = self.content.to_text();
        for path in &self.paths {
            if read_from(path).is_ok_and(|text| *text == *ours) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Waits for the key that the host leaves for this `place`, and connects with it. If the server does not have that key,
/// it is from an earlier run, and a new one is awaited.
pub fn join(hello: &Hello, place: MeetingPlace<'_>, deadline: Instant) -> Result<Joined, InitError> {
    let mut refused: Vec<Content> = Vec::new();
    let mut last = None;
    loop {
        let found = match (find(hello, place, &refused, deadline), last) {
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

/// Waits for a key for one of the addresses. The `refused` ones were tried before.
fn find(
    who: &Hello,
    place: MeetingPlace<'_>,
    refused: &[Content],
    deadline: Instant,
) -> Result<Content, InitError> {
    let began = Instant::now();
    let mut tried = Tried::default();
    let mut pause = PAUSES[0];
    let mut reminder = Reminder::new(began);
    let mut listened_since = None;
    loop {
        let mut accepts = false;
        for addr in place.addrs {
            let folders = folders();
            let Looked { found, faults } = look(&folders, *addr, place.job)?;
            let mut found = found.into_iter().filter(|found| !refused.contains(found));
            let reached = probe(*addr);
            let alive = |found: &Content| {
                if found.addr == *addr { reached.is_ok() } else { probe(found.addr).is_ok() }
            };
            if let Some(found) = found.find(alive) {
                return Ok(found);
            }
            accepts |= reached.is_ok();
            let outcome = reached.err().map(|error| describe(&error)).unwrap_or_else(|| {
                let passed_over: String = faults.iter().map(|fault| format!(" ({fault})")).collect();
                let places = shown(&folders);
                format!("accepts connections, but rank 0 has left no key for it in {places}{passed_over}")
            });
            tried.note(addr.to_string(), outcome);
        }
        let now = Instant::now();
        listened_since = listened_since.filter(|_| accepts).or(accepts.then_some(now));
        // A derived port is left to the other program: the host, when it starts, takes another one.
        let belongs_to_another = place.job.is_none()
            && listened_since.is_some_and(|since| now.duration_since(since) >= OTHER_SERVER);
        let left = deadline.saturating_duration_since(now);
        let addr = place.addrs.first().map_or_else(String::new, SocketAddr::to_string);
        if left.is_zero() || belongs_to_another {
            return Err(StoreError::Unreachable { addr, after: began.elapsed(), tried }.into());
        }
        if reminder.is_due(now) {
            let waited = began.elapsed();
            tracing::warn!(
                rank = who.rank,
                "{who} is still waiting for the store at {addr}, {waited:.0?} so far and {left:.0?} more: {tried}"
            );
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 3 / 2).min(PAUSES[1]);
    }
}

/// Checks whether a server listens on the address.
fn probe(addr: SocketAddr) -> io::Result<()> {
    TcpStream::connect_timeout(&addr, PROBE).map(drop)
}

fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "refused (no server listens there)".to_string(),
        _ => format!("failed: {error}"),
    }
}

/// What the folders contain for one address.
#[derive(Debug, Default)]
struct Looked {
    found: Vec<Content>,
    /// Folders and files that others could have created, which are ignored.
    faults: Vec<String>,
}

/// Reads the keys for this address from all folders; an error if no folder can be trusted.
fn look(folders: &[PathBuf], asked: SocketAddr, job: Option<&str>) -> Result<Looked, InitError> {
    let mut looked = Looked::default();
    for folder in folders {
        let path = folder.join(name_of(asked, job));
        match read_from(&path) {
            Ok(text) => looked.found.push(Content::from_text(&text, asked)?),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => looked.faults.push(format!("{}: {error}", path.display())),
        }
    }
    if looked.faults.len() == folders.len() {
        return Err(InitError::KeyFolder { why: looked.faults.join(", ") });
    }
    Ok(looked)
}

/// Reads a file that belongs to this user and is closed to others, in a folder that does and is too.
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

/// Writes the file beside and then renames it: a reader finds a complete file, and an existing one is replaced.
fn write_into(folder: &Path, name: &str, content: &Content) -> io::Result<PathBuf> {
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
    let written = file.write_all(content.to_text().as_bytes());
    let written = written.and_then(|()| Ok(rustix::fs::renameat(&dir, &beside, &dir, name)?));
    if let Err(error) = written {
        let _ = rustix::fs::unlinkat(&dir, &beside, rustix::fs::AtFlags::empty());
        return Err(error);
    }
    Ok(folder.join(name))
}

/// Opens a folder that belongs to this user and is closed to others; symbolic links are refused.
fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, folder, flags, Mode::empty())?;
    check_private(&File::from(dir.try_clone()?).metadata()?)?;
    Ok(dir)
}

fn check_private(meta: &std::fs::Metadata) -> io::Result<()> {
    let mode = meta.mode() & 0o7777;
    let owner = meta.uid();
    if mode & 0o077 == 0 && owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let what = format!("it belongs to uid {owner} and has mode {mode:04o}, expected this user and no others");
    Err(io::Error::new(ErrorKind::PermissionDenied, what))
}

/// The folders in which a key may be.
fn folders() -> Vec<PathBuf> {
    let mut folders = shared_folders();
    folders.push(temporary_folder());
    let mut seen = std::collections::HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// The folders in which all processes of this user look, whatever their variables are; the best one first.
fn shared_folders() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let own =
        |base: &PathBuf| std::fs::symlink_metadata(base).is_ok_and(|meta| meta.is_dir() && meta.uid() == uid);
    let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|base| base.is_absolute());
    let runtime = given.into_iter().chain([PathBuf::from(format!("/run/user/{uid}"))]).filter(own);
    runtime.map(|base| base.join("drumline")).chain([PathBuf::from(format!("/tmp/drumline-{uid}"))]).collect()
}

/// The folder for processes that can write nowhere else.
fn temporary_folder() -> PathBuf {
    std::env::temp_dir().join(format!("drumline-{}", rustix::process::geteuid().as_raw()))
}

fn shown(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(" or ")
}

/// The file's name: `127.0.0.1-29500-4026531840`, and for a derived port 16 more digits, which stand for the job's
/// name.
fn name_of(addr: SocketAddr, job: Option<&str>) -> String {
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let digits: String = namespace.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    let name = format!("{}-{}-{digits}", addr.ip(), addr.port());
    let Some(job) = job else { return name };
    let hash = Sha256::digest(job.as_bytes());
    hash.iter().take(8).fold(name + "-", |name, byte| format!("{name}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn addr() -> SocketAddr {
        "127.0.0.1:29500".parse().unwrap()
    }

    fn content() -> Content {
        Content { key: JobKey::random(), addr: addr() }
    }

    #[test]
    fn a_key_round_trips_and_replaces_an_older_one() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("drumline");
        for _ in 0..2 {
            let written = content();
            let path = write_into(&folder, "name", &written).unwrap();
            let other = "127.0.0.1:1".parse().unwrap();
            assert_eq!(Content::from_text(&read_from(&path).unwrap(), other).unwrap(), written);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing beside it");
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn folders_and_files_that_others_could_have_created_are_refused() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("drumline");
        let path = write_into(&folder, "name", &content()).unwrap();
        let link = base.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(write_into(&link, "name", &content()).is_err(), "a link");
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
        let good = write_into(&others, &name_of(addr(), None), &content()).unwrap();
        let folders = [folder.clone(), others];
        let looked = look(&folders, addr(), None).unwrap();
        assert_eq!(
            (looked.found.len(), looked.faults.len()),
            (1, 1),
            "an untrusted one does not hide another"
        );
        std::fs::remove_file(good).unwrap();
        assert!(look(&folders, addr(), None).unwrap().found.is_empty());
        assert!(look(&folders[..1], addr(), None).is_err(), "none can be trusted");
        assert!(read_from(&path).is_err() && write_into(&folder, "x", &content()).is_err());
    }

    #[test]
    fn a_file_that_another_host_has_replaced_is_not_removed() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("drumline");
        let leave = || {
            let content = content();
            KeyFile { paths: vec![write_into(&folder, "name", &content).unwrap()], content }
        };
        let (first, second) = (leave(), leave());
        drop(first);
        let path = folder.join("name");
        assert_eq!(*read_from(&path).unwrap(), *second.content.to_text());
        drop(second);
        assert!(!path.exists(), "control: its own is removed");
    }

    #[test]
    fn jobs_that_derive_the_same_port_have_separate_files() {
        let names = [None, Some("slurm 1000.1"), Some("slurm 1001.0")].map(|job| name_of(addr(), job));
        assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
        assert_eq!(names[1], name_of(addr(), Some("slurm 1000.1")), "the same for all ranks");
        assert!(names[1].starts_with(&names[0]) && names[1].len() == names[0].len() + 17, "{names:?}");
    }
}
