//! A text file that grows, read line by line as far as it is written.
//!
//! ```text
//!   poll ─▶ the same file?  no ─▶ StartOver, from its beginning
//!                           yes ─▶ Line, Line, …     half a line at the end waits for the next poll
//! ```
//!
//! A file that was replaced (another inode) or cut short is another file. One that is gone for the moment, as between two
//! renames, is no news.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::OFlags;

/// A longer line is skipped.
const LONGEST_LINE: usize = 1 << 20;

/// What a poll tells.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard<'a> {
    /// All lines told so far are void.
    StartOver,
    /// A line, without its end.
    Line(&'a [u8]),
}

/// Where to begin in a file that is there already.
#[derive(Debug, Clone, Copy)]
pub(super) enum Begin {
    AtStart,
    /// Not more than so many bytes before its end, at the first whole line.
    NearEnd(u64),
}

/// The file, and how far it was read.
#[derive(Debug)]
pub(super) struct Tail {
    path: PathBuf,
    begin: Begin,
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    reader: BufReader<File>,
    /// Held open, the file keeps these numbers for itself.
    identity: (u64, u64),
    position: u64,
    half_line: Vec<u8>,
    /// Up to the next end of a line, as it is too long or its beginning was not read.
    skipping: bool,
}

impl Tail {
    pub(super) fn new(path: PathBuf, begin: Begin) -> Self {
        Self { path, begin, open: None }
    }

    /// Tells what is new, `most` bytes of it; the rest next time.
    pub(super) fn poll(&mut self, most: u64, mut heard: impl FnMut(Heard<'_>)) -> io::Result<()> {
        let now = match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata?,
        };
        let is_same = |open: &Open| open.identity == (now.dev(), now.ino()) && open.position <= now.len();
        if !self.open.as_ref().is_some_and(is_same) {
            let opened = Open::new(&self.path, self.begin)?;
            if self.open.replace(opened).is_some() {
                heard(Heard::StartOver);
            }
        }
        self.open.as_mut().map_or(Ok(()), |open| open.read(most, heard))
    }

    /// When it was last written, in seconds since 1970 by the clock of its file system.
    pub(super) fn modified(&self) -> Option<f64> {
        let modified = fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok()?;
        modified.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64())
    }
}

impl Open {
    fn new(path: &Path, begin: Begin) -> io::Result<Self> {
        let (mut file, length, identity) = open_file(path)?;
        let position = match begin {
            Begin::AtStart => 0,
            Begin::NearEnd(bytes) => length.saturating_sub(bytes),
        };
        file.seek(SeekFrom::Start(position))?;
        let reader = BufReader::with_capacity(1 << 16, file);
        Ok(Self { reader, identity, position, half_line: Vec::new(), skipping: position > 0 })
    }

    fn read(&mut self, most: u64, mut heard: impl FnMut(Heard<'_>)) -> io::Result<()> {
        let end = self.position + most;
        while self.position < end {
            let room = LONGEST_LINE.saturating_sub(self.half_line.len()) as u64;
            let read = self.reader.by_ref().take(room).read_until(b'\n', &mut self.half_line)?;
            if read == 0 {
                return Ok(());
            }
            self.position += read as u64;
            match self.half_line.strip_suffix(b"\n") {
                Some(line) if !self.skipping => heard(Heard::Line(line)),
                Some(_) => self.skipping = false,
                None if self.half_line.len() >= LONGEST_LINE => self.skipping = true,
                None => return Ok(()),
            }
            self.half_line.clear();
        }
        Ok(())
    }
}

/// A file as it is now: its length, and its numbers of device and inode. Nothing else is opened, as a pipe would be waited
/// for without an end.
pub(super) fn open_file(path: &Path) -> io::Result<(File, u64, (u64, u64))> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a plain file"));
    }
    Ok((file, metadata.len(), (metadata.dev(), metadata.ino())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn told(tail: &mut Tail) -> Vec<String> {
        let mut told = Vec::new();
        tail.poll(u64::MAX / 2, |heard| match heard {
            Heard::StartOver => told.push("over".to_owned()),
            Heard::Line(line) => told.push(String::from_utf8_lossy(line).into_owned()),
        })
        .unwrap();
        told
    }

    fn append(path: &Path, text: &str) {
        let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn lines_come_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let mut tail = Tail::new(path.clone(), Begin::AtStart);
        assert!(told(&mut tail).is_empty());
        append(&path, "a\nb\nha");
        assert_eq!(told(&mut tail), ["a", "b"]);
        assert!(told(&mut tail).is_empty());
        append(&path, "lf\n\n");
        assert_eq!(told(&mut tail), ["half", ""]);
    }

    #[test]
    fn a_replaced_or_shortened_file_starts_over() {
        let folder = tempfile::tempdir().unwrap();
        let (path, beside) = (folder.path().join("f"), folder.path().join("g"));
        append(&path, "a\nb\n");
        let mut tail = Tail::new(path.clone(), Begin::AtStart);
        assert_eq!(told(&mut tail), ["a", "b"]);
        fs::write(&beside, "a\nc\nd\n").unwrap();
        fs::rename(&beside, &path).unwrap();
        assert_eq!(told(&mut tail), ["over", "a", "c", "d"]);
        fs::write(&path, "e\n").unwrap();
        assert_eq!(told(&mut tail), ["over", "e"]);
        fs::remove_file(&path).unwrap();
        assert!(told(&mut tail).is_empty());
        append(&path, "f\n");
        assert_eq!(told(&mut tail), ["over", "f"]);
    }

    #[test]
    fn the_end_of_a_long_file_and_no_endless_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        append(&path, "first\nsecond\nthird\n");
        let mut tail = Tail::new(path.clone(), Begin::NearEnd(8));
        assert_eq!(told(&mut tail), ["third"]);
        append(&path, &format!("{}\nafter\n", "x".repeat(3 * LONGEST_LINE)));
        assert_eq!(told(&mut tail), ["after"]);
    }

    #[test]
    fn a_budget_is_kept_and_the_rest_comes_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        append(&path, "a\nb\nc\n");
        let mut tail = Tail::new(path, Begin::AtStart);
        let mut lines = 0;
        tail.poll(3, |_| lines += 1).unwrap();
        assert_eq!(lines, 2);
        assert_eq!(told(&mut tail), ["c"]);
    }

    #[test]
    fn a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(Tail::new(path, Begin::AtStart).poll(1, |_| ()).is_err());
    }
}
