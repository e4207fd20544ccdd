//! The job key: 256 random bits that the processes of one job share and nobody else knows.
//!
//! It reaches a worker by an inherited descriptor or a private file, never by an argument or a variable, which other
//! programs of the machine could read. Ranks on one machine that were given none share one that rank 0 makes
//! ([`user_key`](crate::user_key)). Where even that cannot be there is the open key, known to all, good on loopback only.

use crate::worker_env::{DRUMLINE_JOB_KEY_FD, DRUMLINE_JOB_KEY_FILE};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const OPEN: [u8; 32] = *b"drumline: open key, not a secret";

/// The secret of one job; wiped from memory when dropped, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey(Zeroizing<[u8; 32]>);

/// Why a job key could not be had.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Not 64 hex digits.
    #[error("a job key has 64 hex digits, got {digits} characters of which {bad} are no hex digits")]
    NotHex {
        /// Characters given.
        digits: usize,
        /// Those that are no hex digits.
        bad: usize,
    },
    /// The inherited descriptor cannot be read.
    #[error(
        "{DRUMLINE_JOB_KEY_FD}={value} is no readable descriptor with 32 key bytes: {source}; try starting the rank through the launcher, which passes it on, or unset the variable"
    )]
    Descriptor {
        /// What the variable says.
        value: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The key file cannot be read.
    #[error(
        "cannot read the job key from {DRUMLINE_JOB_KEY_FILE}={0}: {source}; try `drumline key new {0}` once, and copying it to every machine",
        path.display()
    )]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A new key would take the place of an old one.
    #[error("{} is there already and is left alone; try another name, or removing it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A new key cannot be written.
    #[error("cannot write a new job key to {}: {source}", path.display())]
    NewFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The key file is open to others.
    #[error("job key file {} has mode {mode:04o} and owner {owner}; it must be readable by its owner (you) only; try `chmod 600`", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// Its owner.
        owner: u32,
    },
    /// The key file does not hold a key.
    #[error(
        "job key file {0} holds {bytes} bytes{1}, expected 64 hex digits; try removing it, and `drumline key new {0}`",
        path.display(),
        source.strange_characters()
    )]
    FileContent {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// What is wrong with it.
        #[source]
        source: Box<KeyError>,
    },
}

impl KeyError {
    /// For the message about a file that has the right length.
    fn strange_characters(&self) -> String {
        match self {
            KeyError::NotHex { digits: 64, bad } => format!(", of which {bad} are no hex digits"),
            _ => String::new(),
        }
    }
}

impl JobKey {
    /// A new secret key.
    pub fn random() -> JobKey {
        let mut bytes = Zeroizing::new([0; 32]);
        random_bytes(&mut *bytes);
        JobKey(bytes)
    }

    /// The key everybody knows, for a job without a secret: it only serves on loopback.
    pub fn open() -> JobKey {
        JobKey(Zeroizing::new(OPEN))
    }

    /// Takes 32 bytes as the key.
    pub fn from_bytes(bytes: [u8; 32]) -> JobKey {
        JobKey(Zeroizing::new(bytes))
    }

    /// Reads 64 hex digits, white space around them allowed.
    pub fn from_hex(text: &str) -> Result<JobKey, KeyError> {
        let digits: Zeroizing<Vec<u8>> = Zeroizing::new(
            text.trim().chars().map(|c| c.to_digit(16).map_or(u8::MAX, |d| d as u8)).collect(),
        );
        let bad = digits.iter().filter(|d| **d == u8::MAX).count();
        if digits.len() != 64 || bad > 0 {
            return Err(KeyError::NotHex { digits: digits.len(), bad });
        }
        let mut bytes = Zeroizing::new([0; 32]);
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        Ok(JobKey(bytes))
    }

    /// The key this worker was given: by descriptor, by file, or else the open key.
    pub fn from_env() -> Result<JobKey, KeyError> {
        if let Ok(number) = std::env::var(DRUMLINE_JOB_KEY_FD) {
            return Self::from_descriptor(&number)
                .map_err(|source| KeyError::Descriptor { value: number, source });
        }
        match std::env::var_os(DRUMLINE_JOB_KEY_FILE) {
            Some(path) => Self::from_file(Path::new(&path)),
            None => Ok(Self::open()),
        }
    }

    /// Reads a key file; it must belong to this user and be closed to others.
    pub fn from_file(path: &Path) -> Result<JobKey, KeyError> {
        let failed = |source| KeyError::File { path: path.into(), source };
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let (mode, owner) = (meta.mode() & 0o7777, meta.uid());
        if mode & 0o077 != 0 || owner != rustix::process::geteuid().as_raw() {
            return Err(KeyError::Exposed { path: path.into(), mode, owner });
        }
        let mut text = Zeroizing::new(vec![0; 256]);
        let len = file.read_at(&mut text, 0).map_err(failed)?;
        let text = std::str::from_utf8(&text[..len]).unwrap_or("");
        let faulty = |e| KeyError::FileContent { path: path.into(), bytes: meta.len(), source: Box::new(e) };
        Self::from_hex(text).map_err(faulty)
    }

    /// Makes a new key in a new file that only its owner can read; a file that is there already is left alone.
    ///
    /// ```
    /// use drumline_rendezvous::JobKey;
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("job.key");
    /// let key = JobKey::new_file(&path)?;
    /// assert_eq!(JobKey::from_file(&path)?, key);
    /// assert!(JobKey::new_file(&path).unwrap_err().to_string().contains("is there already"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new_file(path: &Path) -> Result<JobKey, KeyError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => KeyError::Exists { path: path.into() },
            _ => KeyError::NewFile { path: path.into(), source },
        };
        let key = Self::random();
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        let written = writeln!(file, "{}", *key.to_hex()).and_then(|()| file.sync_all());
        if written.is_err() {
            // Half a key would be found by the next one.
            let _ = std::fs::remove_file(path);
        }
        written.map_err(failed)?;
        Ok(key)
    }

    /// Opened anew through /proc, so that nobody's position in the shared descriptor moves.
    fn from_descriptor(number: &str) -> io::Result<JobKey> {
        let number: u32 = number.trim().parse().map_err(io::Error::other)?;
        let file = File::open(format!("/proc/self/fd/{number}"))?;
        let mut bytes = Zeroizing::new([0; 32]);
        file.read_exact_at(&mut *bytes, 0)?;
        Ok(JobKey(bytes))
    }

    /// The key of one job among several that were given this key: an open key stays open.
    ///
    /// ```
    /// use drumline_rendezvous::JobKey;
    /// let key = JobKey::random();
    /// assert_eq!(key.for_job("slurm 12.0"), key.for_job("slurm 12.0"));
    /// assert_ne!(key.for_job("slurm 12.0"), key.for_job("slurm 12.1"));
    /// ```
    pub fn for_job(&self, job: &str) -> JobKey {
        if !self.is_secret() {
            return self.clone();
        }
        let mut mac = Hmac::<Sha256>::new_from_slice(self.as_bytes()).expect("HMAC takes keys of any length");
        mac.update(b"drumline job ");
        mac.update(job.as_bytes());
        JobKey(Zeroizing::new(mac.finalize().into_bytes().into()))
    }

    /// Whether this is a real secret and not the open key.
    pub fn is_secret(&self) -> bool {
        *self.0 != OPEN
    }

    /// The 32 bytes, for handing the key to a child or a private file.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key as 64 hex digits.
    pub fn to_hex(&self) -> Zeroizing<String> {
        let mut text = String::with_capacity(64);
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                text.extend(char::from_digit(digit.into(), 16));
            }
        }
        Zeroizing::new(text)
    }
}

/// Fills `bytes` from the system's random source.
pub(crate) fn random_bytes(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("getrandom(2) is there on every Linux this crate builds for");
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn hex_round_trip_and_bad_text() {
        let key = JobKey::random();
        assert_eq!(JobKey::from_hex(&key.to_hex()).unwrap(), key);
        assert!(key.is_secret() && !JobKey::open().is_secret());
        assert_eq!(format!("{key:?}"), "JobKey(..)");
        let error = JobKey::from_hex("xyz").unwrap_err().to_string();
        assert_eq!(error, "a job key has 64 hex digits, got 3 characters of which 3 are no hex digits");
    }

    #[test]
    fn key_file_must_be_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = JobKey::random();
        std::fs::write(&path, format!("{}\n", *key.to_hex())).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(matches!(JobKey::from_file(&path), Err(KeyError::Exposed { mode: 0o644, .. })));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(JobKey::from_file(&path).unwrap(), key);
    }

    #[test]
    fn what_is_wrong_with_a_key_file_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let told = |path: &Path| JobKey::from_file(path).unwrap_err().to_string();
        let missing = "/key: No such file or directory (os error 2); try `drumline key new ";
        assert!(told(&path).contains(missing), "{}", told(&path));
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        };
        write("oops");
        assert!(
            told(&path).contains("/key holds 4 bytes, expected 64 hex digits; try removing it"),
            "{}",
            told(&path)
        );
        write(&"0x".repeat(32));
        assert!(told(&path).contains("64 bytes, of which 32 are no hex digits, expected"), "{}", told(&path));
    }

    #[test]
    fn key_from_a_descriptor_can_be_read_again_and_again() {
        use std::os::fd::AsRawFd;
        let mut file = tempfile::tempfile().unwrap();
        let key = JobKey::random();
        file.write_all(key.as_bytes()).unwrap();
        for _ in 0..3 {
            assert_eq!(JobKey::from_descriptor(&file.as_raw_fd().to_string()).unwrap(), key);
        }
        assert!(JobKey::from_descriptor("9999").is_err());
    }
}
