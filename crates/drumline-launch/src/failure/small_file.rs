//! Reads a short text file of the system, with a size limit.

use std::fs::File;
use std::io::Read;
use std::path::Path;

const LARGEST: u64 = 64 << 10;

/// The first bytes of a file as text; `None` if it cannot be read.
pub(crate) fn read_small(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LARGEST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
