//! The header of a store file: its format, and the run that it belongs to.

use crate::handshake::this_host;
use crate::job_key::random_bytes;
use crate::store::error::{BadFileError, StoreError};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

const MAGIC: [u8; 8] = *b"DRUMFILE";
const VERSION: u16 = 2;
/// Magic, version, length of the rest.
const FIXED: usize = 8 + 2 + 2;
const MAX_RUN: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) run: String,
    pub(super) host: String,
    pub(super) pid: u32,
}

impl Header {
    pub(super) fn new(run: &str) -> Header {
        Header { run: run.into(), host: this_host(), pid: std::process::id() }
    }

    /// Creates the file with this header atomically: it is written beside and then linked, which fails if the name
    /// exists.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        if self.run.len() > MAX_RUN {
            return Err(io::Error::other(format!("the name of a run may have at most {MAX_RUN} bytes")));
        }
        let text = serde_json::to_vec(self)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text);

        let mut number = [0; 8];
        random_bytes(&mut number);
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(format!(".{:016x}.new", u64::from_le_bytes(number)));
        let beside = path.with_file_name(name);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        let result = file.write_all(&bytes).and_then(|()| std::fs::hard_link(&beside, path));
        std::fs::remove_file(&beside)?;
        result
    }

    /// Opens a store file. Returns the file, its header, and where the records begin.
    pub(super) fn read(path: &Path) -> Result<(File, Header, u64), StoreError> {
        let failed = |error| StoreError::io(format!("cannot open {}", path.display()))(error);
        let bad = |source| StoreError::BadFile { path: path.into(), source };
        let flags = OFlags::NOFOLLOW.bits() as i32;
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let expected = rustix::process::geteuid().as_raw();
        if !meta.is_file() || meta.uid() != expected || meta.mode() & 0o077 != 0 {
            let owner = meta.uid();
            let mode = meta.mode() & 0o7777;
            return Err(bad(BadFileError::NotPrivate { expected, owner, mode }));
        }
        let mut bytes = vec![0; (meta.len() as usize).min(FIXED + 8 * MAX_RUN)];
        file.read_exact_at(&mut bytes, 0).map_err(failed)?;
        let (header, end) = Self::parse(&bytes).map_err(bad)?;
        Ok((file, header, end as u64))
    }

    fn parse(bytes: &[u8]) -> Result<(Header, usize), BadFileError> {
        let fixed = bytes.first_chunk::<FIXED>().ok_or(BadFileError::Short)?;
        if fixed[..8] != MAGIC {
            return Err(BadFileError::Magic);
        }
        let got = u16::from_le_bytes([fixed[8], fixed[9]]);
        if got != VERSION {
            return Err(BadFileError::Version { got, expected: VERSION });
        }
        let end = FIXED + usize::from(u16::from_le_bytes([fixed[10], fixed[11]]));
        let text = bytes.get(FIXED..end).ok_or(BadFileError::Short)?;
        let header = serde_json::from_slice(text).map_err(|error| BadFileError::Header(error.to_string()))?;
        Ok((header, end))
    }
}
