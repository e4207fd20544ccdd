//! The lines of a text file, in any order, without the file in memory.
//!
//! ```text
//!   one pass to open:   line 0 … line 7 │ line 8 … line 15 │ …      remembers where each block starts: 1 byte per line
//!   line(11):           read_at(block 1), then its fourth line
//! ```
//! A line ends with `\n` or `\r\n`; the last one may also end with the file. Opening checks that the whole file is UTF-8. A byte
//! order mark at the beginning, which some editors write, is not part of the first line.

use crate::TextError;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Lines per block. A block is read at once, so larger blocks would save memory and cost time.
const BLOCK: u64 = 8;

const BUFFER: usize = 1 << 18;

/// A text file whose lines can be read in any order, from several threads.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("valid.en");
/// std::fs::write(&path, "a house\n\nthe end")?;
/// let file = drumline_text::LineFile::open(&path)?;
/// assert_eq!(file.len(), 3);
/// assert_eq!(file.line(2)?, "the end");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LineFile {
    path: PathBuf,
    file: File,
    /// The start of each block, and at the end the length of the file.
    starts: Vec<u64>,
    len: u64,
}

impl LineFile {
    /// Reads the file once, to find where its lines are.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TextError> {
        Self::open_with(path.as_ref(), |_| Ok(()))
    }

    /// Like [`open`](Self::open), but also calls `visit` with each line.
    pub fn open_with(
        path: &Path,
        mut visit: impl FnMut(&str) -> Result<(), TextError>,
    ) -> Result<Self, TextError> {
        let failed = |source| TextError::ReadFile { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(failed(ErrorKind::IsADirectory.into()));
        }
        let mut starts = Vec::new();
        let mut len = 0;
        let end = scan(&file, path, |number, start, line| {
            if (number - 1).is_multiple_of(BLOCK) {
                starts.push(start);
            }
            len = number;
            visit(line)
        })?;
        starts.push(end);
        starts.shrink_to_fit();
        Ok(Self { path: path.to_owned(), file, starts, len })
    }

    /// The number of lines.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there are no lines, not even an empty one.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The length of the file when it was opened.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// A line without its end, by its number from 0.
    pub fn line(&self, index: usize) -> Result<String, TextError> {
        if index >= self.len() {
            return Err(TextError::OutOfRange { path: self.path.clone(), index, len: self.len() });
        }
        let block = self.block(index / BLOCK as usize)?;
        let line = block.split_inclusive(|byte| *byte == b'\n').nth(index % BLOCK as usize);
        let line = line.and_then(|line| str::from_utf8(without_end(line)).ok());
        line.map(|line| without_mark(index as u64, line).to_owned())
            .ok_or_else(|| TextError::Changed { path: self.path.clone() })
    }

    fn block(&self, block: usize) -> Result<Vec<u8>, TextError> {
        let start = self.starts[block];
        let mut bytes = vec![0; (self.starts[block + 1] - start) as usize];
        match self.file.read_exact_at(&mut bytes, start) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(TextError::Changed { path: self.path.clone() })
            }
            Err(source) => Err(TextError::ReadFile { path: self.path.clone(), source }),
        }
    }
}

/// Calls `visit` with each line of a file and its number, from 1.
pub(crate) fn for_each_line(
    path: &Path,
    mut visit: impl FnMut(u64, &str) -> Result<(), TextError>,
) -> Result<(), TextError> {
    let failed = |source| TextError::ReadFile { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    scan(&file, path, |number, _, line| visit(number, line)).map(drop)
}

/// Calls `visit` with each line's number, from 1, its start in bytes, and its text. Returns where the last line ends.
fn scan(
    file: &File,
    path: &Path,
    mut visit: impl FnMut(u64, u64, &str) -> Result<(), TextError>,
) -> Result<u64, TextError> {
    let mut reader = BufReader::with_capacity(BUFFER, file);
    let mut bytes = Vec::new();
    let mut start = 0;
    for number in 1.. {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes);
        let read = read.map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
        if read == 0 {
            break;
        }
        let line = str::from_utf8(without_end(&bytes)).map_err(|error| TextError::NotUtf8 {
            path: path.to_owned(),
            line: number,
            at: error.valid_up_to() + 1,
        })?;
        visit(number, start, without_mark(number - 1, line))?;
        start += read as u64;
    }
    Ok(start)
}

fn without_mark(index: u64, line: &str) -> &str {
    if index == 0 { line.strip_prefix('\u{feff}').unwrap_or(line) } else { line }
}

fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file_of(text: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    proptest! {
        #[test]
        fn each_line_is_found(lines in prop::collection::vec("[a-zé\u{2028} ]{0,9}", 0..40), ended in any::<bool>()) {
            let mut text = lines.join("\n");
            let mut expected = lines.clone();
            if ended && !lines.is_empty() {
                text.push('\n');
            } else if lines.last().is_some_and(String::is_empty) {
                expected.pop();
            }
            let (_folder, path) = file_of(text.as_bytes());
            let file = LineFile::open(&path).unwrap();
            let found: Vec<_> = (0..file.len()).map(|index| file.line(index).unwrap()).collect();
            prop_assert_eq!(found, expected);
            prop_assert!(file.line(file.len()).is_err());
        }
    }

    #[test]
    fn an_error_names_the_line_that_is_not_utf8() {
        let (_folder, path) = file_of(b"one\ntwo\nth\xffree\n");
        let error = LineFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("line 3 of") && error.contains("at byte 3"), "{error}");
        let (_folder, path) = file_of(b"one\r\ntwo\r");
        let file = LineFile::open(&path).unwrap();
        assert_eq!((file.line(0).unwrap().as_str(), file.line(1).unwrap().as_str()), ("one", "two"));
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_the_first_line() {
        let (_folder, path) = file_of("\u{feff}one\n\u{feff}two\n".as_bytes());
        let mut seen = Vec::new();
        let file = LineFile::open_with(&path, |line| {
            seen.push(line.to_owned());
            Ok(())
        });
        let file = file.unwrap();
        assert_eq!(seen, ["one", "\u{feff}two"]);
        assert_eq!([0, 1].map(|index| file.line(index).unwrap()), ["one", "\u{feff}two"]);
    }

    #[test]
    fn a_file_that_was_truncated_after_opening_is_an_error() {
        let (_folder, path) = file_of("a line\n".repeat(20).as_bytes());
        let file = LineFile::open(&path).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
        assert_eq!(file.line(0).unwrap(), "a line");
        assert!(file.line(19).unwrap_err().to_string().contains("has changed since"));
    }

    #[test]
    fn a_folder_and_a_missing_file_cannot_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), &folder.path().join("absent")] {
            assert!(LineFile::open(path).unwrap_err().to_string().starts_with("cannot read"));
        }
    }
}
