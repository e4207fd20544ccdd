//! The entries of a zip archive that `torch.save` wrote: stored one after another, never compressed.
//!
//! ```text
//!   local header, name, padding │ bytes │ … │ directory: name, length, checksum, offset of each │ end record
//! ```
//! Archives of more than 4 GiB have a second end record and 64-bit fields (zip64). The directory is read from the end;
//! a local header only says how long it is itself.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crc32fast::Hasher;

use crate::error::ZipError;

const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";
const IN_DIRECTORY: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

const END_LEN: u64 = 22;
const LOCATOR_LEN: u64 = 20;
const END_64_LEN: u64 = 56;
const IN_DIRECTORY_LEN: usize = 46;
const LOCAL_LEN: u64 = 30;

/// The longest comment behind the end record.
const COMMENT: u64 = 0xffff;

/// The longest directory that is read: some hundred thousand tensors.
const LONGEST_DIRECTORY: u64 = 64 << 20;

/// Bytes that are read and hashed together.
const PIECE: usize = 1 << 20;

/// A file in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Its bytes in the archive.
    pub(crate) bytes: Range<u64>,
    /// `None` if the writer did not compute it.
    crc32: Option<u32>,
}

/// What the directory says of an entry.
struct Listed {
    name: String,
    len: u64,
    crc32: u32,
    local: u64,
}

/// The entries of an archive, in the order of its directory.
pub(crate) fn entries(file: &File) -> Result<Vec<Entry>, ZipError> {
    let len = file.metadata()?.len();
    let directory = directory(file, len)?;
    if directory.end - directory.start > LONGEST_DIRECTORY {
        return Err(ZipError::Impossible { what: "directory", len });
    }
    let directory = read(file, directory)?;
    let (mut rest, mut entries) = (&directory[..], Vec::new());
    while rest.starts_with(&IN_DIRECTORY) {
        let (listed, next) = listed(rest, len)?;
        entries.push(located(file, listed, len)?);
        rest = next;
    }
    Ok(entries)
}

/// The bytes of the directory.
fn directory(file: &File, len: u64) -> Result<Range<u64>, ZipError> {
    let tail_start = len.saturating_sub(END_LEN + COMMENT);
    let tail = read(file, tail_start..len)?;
    let found = tail.windows(END.len()).rposition(|bytes| bytes == END);
    let found = found.filter(|found| tail.len() - found >= END_LEN as usize).ok_or(ZipError::NotAnArchive)?;
    let end = &tail[found..];
    let end_start = tail_start + found as u64;
    let (mut size, mut start) = (u64::from(u32_at(end, 12)), u64::from(u32_at(end, 16)));
    if let Some(locator) = end_start.checked_sub(LOCATOR_LEN) {
        let locator = read(file, locator..end_start)?;
        if locator.starts_with(&LOCATOR_64) {
            let at = u64_at(&locator, 8);
            let end_64 = within(at, END_64_LEN, len, "second end record")?;
            let end_64 = read(file, end_64)?;
            if !end_64.starts_with(&END_64) {
                return Err(ZipError::Impossible { what: "second end record", len });
            }
            (size, start) = (u64_at(&end_64, 40), u64_at(&end_64, 48));
        }
    }
    within(start, size, end_start, "directory")
}

/// The first entry of this part of the directory, and the part behind it.
fn listed(bytes: &[u8], len: u64) -> Result<(Listed, &[u8]), ZipError> {
    let impossible = || ZipError::Impossible { what: "directory", len };
    let (header, rest) = bytes.split_at_checked(IN_DIRECTORY_LEN).ok_or_else(impossible)?;
    let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(header, at)));
    let (name, rest) = rest.split_at_checked(name).ok_or_else(impossible)?;
    let (extra, rest) = rest.split_at_checked(extra).ok_or_else(impossible)?;
    let (_, rest) = rest.split_at_checked(comment).ok_or_else(impossible)?;
    let name = String::from_utf8_lossy(name).into_owned();
    let (flags, method) = (u16_at(header, 8), u16_at(header, 10));
    if method != 0 || flags & 1 != 0 {
        return Err(ZipError::NotStored { name });
    }
    let fields = [20, 24, 42].map(|at| u32_at(header, at));
    let [packed, len_of, local] = wide(fields, extra).ok_or_else(impossible)?;
    if packed != len_of {
        return Err(ZipError::NotStored { name });
    }
    Ok((Listed { name, len: len_of, crc32: u32_at(header, 16), local }, rest))
}

/// The fields as 64-bit numbers: those that do not fit are in the extra field, in the order in which they are listed
/// there: length, packed length, offset.
fn wide([packed, len, local]: [u32; 3], extra: &[u8]) -> Option<[u64; 3]> {
    let mut large = extra_64(extra)?.chunks_exact(8).map(|bytes| u64_at(bytes, 0));
    let mut field = |field: u32| if field == u32::MAX { large.next() } else { Some(u64::from(field)) };
    let len = field(len)?;
    let packed = field(packed)?;
    Some([packed, len, field(local)?])
}

/// The contents of the zip64 field among the extra fields; empty if there is none.
fn extra_64(mut extra: &[u8]) -> Option<&[u8]> {
    while extra.len() >= 4 {
        let (kind, len) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let (field, rest) = extra[4..].split_at_checked(len)?;
        if kind == 1 {
            return Some(field);
        }
        extra = rest;
    }
    Some(&[])
}

/// Finds the bytes of an entry behind its local header.
fn located(file: &File, listed: Listed, file_len: u64) -> Result<Entry, ZipError> {
    let Listed { name, len, crc32, local } = listed;
    let header = read(file, within(local, LOCAL_LEN, file_len, "local header")?)?;
    if !header.starts_with(&LOCAL) {
        return Err(ZipError::Impossible { what: "local header", len: file_len });
    }
    let rest = u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
    let bytes = within(local + LOCAL_LEN + rest, len, file_len, "entry")?;
    // torch.save can leave checksums away, and then writes 0.
    Ok(Entry { name, bytes, crc32: (crc32 != 0).then_some(crc32) })
}

impl Entry {
    /// All its bytes, if they are at most `limit`.
    pub(crate) fn read(&self, file: &File, limit: u64) -> Result<Vec<u8>, ZipError> {
        let len = self.bytes.end - self.bytes.start;
        if len > limit {
            return Err(ZipError::TooLarge { name: self.name.clone(), len, limit });
        }
        let bytes = read(file, self.bytes.clone())?;
        let mut hasher = Hasher::new();
        hasher.update(&bytes);
        self.compare(hasher)?;
        Ok(bytes)
    }

    /// Reads its bytes once, and compares their checksum.
    pub(crate) fn check(&self, file: &File) -> Result<(), ZipError> {
        if self.crc32.is_none() {
            return Ok(());
        }
        let Range { mut start, end } = self.bytes;
        let mut piece = vec![0; PIECE.min((end - start) as usize)];
        let mut hasher = Hasher::new();
        while start < end {
            let len = piece.len().min((end - start) as usize);
            file.read_exact_at(&mut piece[..len], start)?;
            hasher.update(&piece[..len]);
            start += len as u64;
        }
        self.compare(hasher)
    }

    fn compare(&self, hasher: Hasher) -> Result<(), ZipError> {
        let found = hasher.finalize();
        match self.crc32 {
            Some(expected) if expected != found => {
                Err(ZipError::Checksum { name: self.name.clone(), expected, found })
            }
            _ => Ok(()),
        }
    }
}

/// The range, if it lies in a file of `len` bytes.
fn within(start: u64, size: u64, len: u64, what: &'static str) -> Result<Range<u64>, ZipError> {
    let end = start.checked_add(size).filter(|end| *end <= len);
    end.map(|end| start..end).ok_or(ZipError::Impossible { what, len })
}

fn read(file: &File, bytes: Range<u64>) -> Result<Vec<u8>, ZipError> {
    let mut read = vec![0; (bytes.end - bytes.start) as usize];
    file.read_exact_at(&mut read, bytes.start)?;
    Ok(read)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Archives for tests.
#[cfg(test)]
pub(crate) mod archive {
    use super::*;

    /// How lengths are written.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(crate) enum Field {
        Short,
        Zip64,
    }

    /// An archive with these entries.
    pub(crate) fn archive(entries: &[(&str, &[u8])], field: Field) -> Vec<u8> {
        let (mut bytes, mut directory) = (Vec::new(), Vec::new());
        for (name, contents) in entries {
            let local = bytes.len();
            bytes.extend(LOCAL);
            bytes.extend([0; 22]);
            // The name, and an extra field as padding, as torch.save aligns elements.
            bytes.extend([name.len() as u8, 0, 6, 0]);
            bytes.extend(name.as_bytes());
            bytes.extend([0xff, 0xff, 2, 0, 0, 0]);
            bytes.extend(*contents);
            list(&mut directory, name, contents, local, field);
        }
        let start = bytes.len();
        bytes.extend(&directory);
        if field == Field::Zip64 {
            let end_64 = bytes.len() as u64;
            bytes.extend(END_64);
            bytes.extend([0; 36]);
            bytes.extend((directory.len() as u64).to_le_bytes());
            bytes.extend((start as u64).to_le_bytes());
            bytes.extend(LOCATOR_64);
            bytes.extend([0; 4]);
            bytes.extend(end_64.to_le_bytes());
            bytes.extend([0; 4]);
        }
        bytes.extend(END);
        bytes.extend([0; 8]);
        let short = |value: usize| if field == Field::Zip64 { u32::MAX } else { value as u32 };
        bytes.extend(short(directory.len()).to_le_bytes());
        bytes.extend(short(start).to_le_bytes());
        bytes.extend([0; 2]);
        bytes
    }

    fn list(directory: &mut Vec<u8>, name: &str, contents: &[u8], local: usize, field: Field) {
        let mut hasher = Hasher::new();
        hasher.update(contents);
        let wide = [contents.len() as u64, contents.len() as u64, local as u64];
        let extra = if field == Field::Zip64 { 4 + 24 } else { 0 };
        let short = |value: u64| if field == Field::Zip64 { u32::MAX } else { value as u32 };
        directory.extend(IN_DIRECTORY);
        directory.extend([0; 12]);
        directory.extend(hasher.finalize().to_le_bytes());
        directory.extend(short(wide[0]).to_le_bytes());
        directory.extend(short(wide[1]).to_le_bytes());
        directory.extend([name.len() as u8, 0, extra, 0]);
        directory.extend([0; 10]);
        directory.extend(short(wide[2]).to_le_bytes());
        directory.extend(name.as_bytes());
        if field == Field::Zip64 {
            directory.extend([1, 0, 24, 0]);
            wide.iter().for_each(|value| directory.extend(value.to_le_bytes()));
        }
    }
}
