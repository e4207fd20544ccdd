//! The job key: 256 random bits that only the processes of one job share.
//!
//! It reaches a worker through an inherited descriptor or a private file, never through an argument or a variable,
//! which other programs of the machine could read. Ranks on one machine that were given none share one that rank 0
//! creates ([`user_key`](crate::user_key)). If even that is impossible, there is the open key, which is public and only
//! valid on loopback.

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

/// Why there is no usable job key.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Not 64 hex digits.
    #[error("a job key has 64 hex digits, got {digits} characters of which {bad} are not hex digits")]
    NotHex {
        /// Characters given.
        digits: usize,
        /// How many of them are not hex digits.
        bad: usize,
    },
    /// The inherited descriptor cannot be read.
    #[error(
        "{DRUMLINE_JOB_KEY_FD}={value} is not a readable descriptor with 32 key bytes: {source}; try starting the rank through the launcher, which passes it on, or unset the variable"
    )]
    Descriptor {
        /// The value of the variable.
        value: String,
        /// The system's error.
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
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A new key would replace an existing file.
    #[error("{} already exists and was not changed; try another name, or removing it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A new key cannot be written.
    #[error("cannot write a new job key to {}: {source}", path.display())]
    NewFile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The key file is accessible to others.
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
        source.bad_characters()
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
    /// The part of the message about a file of the right length with wrong characters.
    fn bad_characters(&self) -> String {
        match self {
            KeyError::NotHex { digits: 64, bad } => format!(", of which {bad} are not hex digits"),
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

    /// The public key of a job without a secret; it is only valid on loopback.
    pub fn open() -> JobKey {
        JobKey(Zeroizing::new(OPEN))
    }

    /// Uses 32 bytes as the key.
    pub fn from_bytes(bytes: [u8; 32]) -> JobKey {
        JobKey(Zeroizing::new(bytes))
    }

    /// Parses 64 hex digits; surrounding white space is allowed.
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

    /// The key that this worker was given, by descriptor or by file; else the open key.
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
        let mode = meta.mode() & 0o7777;
        let owner = meta.uid();
        if mode & 0o077 != 0 || owner != rustix::process::geteuid().as_raw() {
            return Err(KeyError::Exposed { path: path.into(), mode, owner });
        }
        let mut text = Zeroizing::new(vec![0; 256]);
        let len = file.read_at(&mut text, 0).map_err(failed)?;
        let text = std::str::from_utf8(&text[..len]).unwrap_or("");
        let faulty = |e| KeyError::FileContent { path: path.into(), bytes: meta.len(), source: Box::new(e) };
        Self::from_hex(text).map_err(faulty)
    }

    /// Creates a new key in a new file that only its owner can read; an existing file is not changed.
    ///
    /// ```
    /// use drumline_rendezvous::JobKey;
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("job.key");
    /// let key = JobKey::new_file(&path)?;
    /// assert_eq!(JobKey::from_file(&path)?, key);
    /// assert!(JobKey::new_file(&path).unwrap_err().to_string().contains("already exists"));
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
            // The next process would find an incomplete key.
            let _ = std::fs::remove_file(path);
        }
        written.map_err(failed)?;
        Ok(key)
    }

    /// Reopens the descriptor through /proc, so that its shared file position does not move.
    fn from_descriptor(number: &str) -> io::Result<JobKey> {
        let number: u32 = number.trim().parse().map_err(io::Error::other)?;
        let file = File::open(format!("/proc/self/fd/{number}"))?;
        let mut bytes = Zeroizing::new([0; 32]);
        file.read_exact_at(&mut *bytes, 0)?;
        Ok(JobKey(bytes))
    }

    /// The key of one job among several that use this key; an open key stays open.
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
    getrandom::fill(bytes).expect("getrandom(2) exists on every Linux that this crate supports");
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
        assert_eq!(error, "a job key has 64 hex digits, got 3 characters of which 3 are not hex digits");
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
    fn errors_say_what_is_wrong_with_a_key_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let error = |path: &Path| JobKey::from_file(path).unwrap_err().to_string();
        let missing = "/key: No such file or directory (os error 2); try `drumline key new ";
        assert!(error(&path).contains(missing), "{}", error(&path));
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        };
        write("oops");
        assert!(
            error(&path).contains("/key holds 4 bytes, expected 64 hex digits; try removing it"),
            "{}",
            error(&path)
        );
        write(&"0x".repeat(32));
        assert!(
            error(&path).contains("64 bytes, of which 32 are not hex digits, expected"),
            "{}",
            error(&path)
        );
    }

    #[test]
    fn a_key_can_be_read_from_a_descriptor_repeatedly() {
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
