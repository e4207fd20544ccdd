//! A text file that grows, read line by line.
//!
//! ```text
//!   …}\n{"kind":"step", … }\n{"kind":"st
//!                           ▲ read up to here; the partial line is read again when there is more of it
//! ```
//! The file may be read at any moment. A file that was replaced, truncated or rewritten is read from its beginning. A file that is
//! missing for a moment, as between two renames, changes nothing. Unusual files neither fill the memory nor block: lines
//! without an end are skipped, and pipes are errors.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Longer lines are not ours; they are skipped.
pub(crate) const LONGEST_LINE: u64 = 1 << 20;

/// The number of bytes before the read position by which a rewritten file is recognised.
const KNOWN: usize = 64;

/// What a poll returns.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TailItem<T> {
    /// All lines so far no longer count.
    StartOver,
    /// A line, without its end.
    Line(T),
}

/// Where to begin in an existing file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Begin {
    AtStart,
    /// At most this many bytes before its end, at the first complete line.
    NearEnd(u64),
}

/// The file, and the read position.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    begin: Begin,
    place: Option<Place>,
}

#[derive(Debug)]
struct Place {
    /// Device and inode number of the file.
    file: (u64, u64),
    /// The offset after the last complete line.
    offset: u64,
    /// The bytes before that.
    known: Vec<u8>,
    /// Whether to skip to the next end of a line, because the line is too long or its beginning was not read.
    passes_over: bool,
}

impl Tail {
    pub(crate) fn new(path: PathBuf, begin: Begin) -> Self {
        Self { path, begin, place: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The read position; `None` before the file was found.
    pub(crate) fn offset(&self) -> Option<u64> {
        self.place.as_ref().map(|place| place.offset)
    }

    /// Passes what is new to `on_item`: about `most` bytes, and the rest next time.
    pub(crate) fn poll(&mut self, most: u64, mut on_item: impl FnMut(TailItem<&[u8]>)) -> io::Result<()> {
        let file = match open_plain(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        let place = match self.place.take_if(|place| place.is_in(&file)) {
            Some(same) => same,
            None => {
                let place = Place::new(&file, self.begin)?;
                if self.place.is_some() {
                    on_item(TailItem::StartOver);
                }
                place
            }
        };
        self.place.insert(place).read_on(&file, most, on_item)
    }
}

impl Place {
    fn new(file: &File, begin: Begin) -> io::Result<Self> {
        let data = file.metadata()?;
        let offset = match begin {
            Begin::AtStart => 0,
            Begin::NearEnd(bytes) => data.len().saturating_sub(bytes),
        };
        Ok(Self { file: (data.dev(), data.ino()), offset, known: Vec::new(), passes_over: offset > 0 })
    }

    /// Whether this is the same file, and what was read of it is unchanged.
    fn is_in(&self, file: &File) -> bool {
        let is_same =
            |data: std::fs::Metadata| (data.dev(), data.ino()) == self.file && data.len() >= self.offset;
        let mut now = vec![0; self.known.len()];
        file.metadata().is_ok_and(is_same)
            && file.read_exact_at(&mut now, self.offset - self.known.len() as u64).is_ok()
            && now == self.known
    }

    fn read_on(
        &mut self,
        mut file: &File,
        most: u64,
        mut on_item: impl FnMut(TailItem<&[u8]>),
    ) -> io::Result<()> {
        file.seek(SeekFrom::Start(self.offset))?;
        let end = self.offset.saturating_add(most);
        let (mut reader, mut line) = (BufReader::with_capacity(1 << 16, file), Vec::new());
        while self.offset < end {
            line.clear();
            reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)?;
            let whole = line.strip_suffix(b"\n");
            match whole {
                None if (line.len() as u64) < LONGEST_LINE => return Ok(()),
                Some(whole) if !self.passes_over => on_item(TailItem::Line(whole)),
                _ => {}
            }
            self.passes_over = whole.is_none();
            self.move_past(&line);
        }
        Ok(())
    }

    fn move_past(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        self.known.extend_from_slice(&bytes[bytes.len().saturating_sub(KNOWN)..]);
        self.known.drain(..self.known.len().saturating_sub(KNOWN));
    }
}

/// Opens a plain file for reading. Anything else is an error: a pipe would block for ever.
pub(crate) fn open_plain(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn items(tail: &mut Tail) -> Vec<String> {
        let mut items = Vec::new();
        tail.poll(u64::MAX / 2, |item| match item {
            TailItem::StartOver => items.push("over".to_owned()),
            TailItem::Line(line) => items.push(String::from_utf8_lossy(line).into_owned()),
        })
        .unwrap();
        items
    }

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn the_end_of_a_long_file_and_no_endless_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        append(&path, "first\nsecond\nthird\n");
        let mut tail = Tail::new(path.clone(), Begin::NearEnd(8));
        assert_eq!(items(&mut tail), ["third"]);
        append(&path, &format!("{}\nafter\n", "x".repeat(3 * LONGEST_LINE as usize)));
        assert_eq!(items(&mut tail), ["after"]);
    }

    #[test]
    fn a_limit_is_kept_and_the_rest_comes_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        append(&path, "a\nb\nc\n");
        let mut tail = Tail::new(path, Begin::AtStart);
        let mut lines = 0;
        tail.poll(3, |_| lines += 1).unwrap();
        assert_eq!(lines, 2);
        assert_eq!(items(&mut tail), ["c"]);
    }

    #[test]
    fn a_pipe_is_an_error_and_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(Tail::new(path, Begin::AtStart).poll(1, |_| ()).is_err());
    }
}
