//! A file of tokens: a header, then one number per token, so that any part can be read by itself.
//!
//! ```text
//!   0         8         12      16           24       32           36        40
//!   DRUMTOKN │ version │ width │ vocabulary │ count  │ tokenizer  │ checksum │ tokens, little-endian …
//! ```
//! `width` is the bytes per token, 2 or 4; `tokenizer` is the fingerprint of the tokenizer; `checksum` is that of the header.
//! Files are written atomically. A file that was truncated, or that grows, cannot be opened.

use crate::{END_OF_TEXT, GptTokenizer, TextError};
use drumline_files::{Durability, Replacement};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"DRUMTOKN";
const VERSION: u32 = 1;

/// The header of a file of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenHeader {
    /// Bytes per token: 2 or 4.
    pub width: usize,
    /// The size of the vocabulary: all tokens are below it.
    pub vocabulary: u32,
    /// The number of tokens in the file.
    pub count: u64,
    /// The tokenizer's [`GptTokenizer::fingerprint`].
    pub tokenizer: u32,
}

impl TokenHeader {
    /// The header of a file without tokens.
    fn new(tokenizer: &GptTokenizer) -> Self {
        let vocabulary = tokenizer.vocabulary();
        let width = if vocabulary <= 1 << 16 { 2 } else { 4 };
        Self { width, vocabulary, count: 0, tokenizer: tokenizer.fingerprint() }
    }

    /// Bytes before the first token.
    pub const LEN: usize = 40;

    /// Reads the header of a file, and checks that the file has the length that follows from it.
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let failed = |source| TextError::ReadFile { path: path.to_owned(), source };
        let file = std::fs::File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut header = Vec::with_capacity(Self::LEN);
        file.take(Self::LEN as u64).read_to_end(&mut header).map_err(failed)?;
        Self::parse(&header, len, path)
    }

    fn parse(header: &[u8], len: u64, path: &Path) -> Result<Self, TextError> {
        let bad = |what: String| Err(TextError::BadFile { path: path.to_owned(), what });
        if header.len() < Self::LEN || !header.starts_with(&MAGIC) {
            return bad("is not a file of tokens; try drumline data tokens TEXT --out FILE".into());
        }
        let number =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| u64::from(number(at)) | u64::from(number(at + 4)) << 32;
        if number(8) != VERSION {
            return bad(format!(
                "has version {}, expected {VERSION}; try drumline data tokens again",
                number(8)
            ));
        }
        let width = number(12) as usize;
        let count = long(24);
        let is_intact = number(36) == crc32fast::hash(&header[..36]) && matches!(width, 2 | 4);
        let Some(vocabulary) = u32::try_from(long(16)).ok().filter(|_| is_intact) else {
            return bad("has a damaged header; try drumline data tokens again".into());
        };
        let expected = Self::LEN as u128 + u128::from(count) * width as u128;
        if u128::from(len) != expected {
            return bad(format!(
                "is incomplete: it has {len} bytes, expected {expected} for its {count} tokens; try drumline data tokens again, or \
                 copy the file again"
            ));
        }
        Ok(Self { width, vocabulary, count, tokenizer: number(32) })
    }

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.width as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&u64::from(self.vocabulary).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.tokenizer.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..36]);
        bytes[36..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }
}

/// Writes the tokens of text files to a file, and returns its header. Each text ends with the tokenizer's end of a text.
///
/// A text file may hold several texts, with [`END_OF_TEXT`] between them. A text is encoded at once, so memory is needed for the
/// longest. After each text, `progress` is called with its length in bytes; an error from it stops the work. An existing file is
/// replaced if it is a file of tokens; any other is an error, and is not touched.
///
/// ```
/// use drumline_text::{GptTokenizer, TokenHeader, write_tokens};
///
/// let folder = tempfile::tempdir()?;
/// let (text, out) = (folder.path().join("a.txt"), folder.path().join("a.tokens"));
/// std::fs::write(&text, "one<|endoftext|>two")?;
/// let header = write_tokens(&[text], &GptTokenizer::bytes(), &out, |_| Ok(()))?;
/// assert_eq!((header.count, header.width, header.vocabulary), (8, 2, 257));
/// assert_eq!(TokenHeader::open(&out)?, header);
/// assert_eq!(std::fs::read(&out)?[TokenHeader::LEN..][..8], [111, 0, 110, 0, 101, 0, 0, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_tokens(
    texts: &[PathBuf],
    tokenizer: &GptTokenizer,
    out: &Path,
    mut progress: impl FnMut(u64) -> Result<(), TextError>,
) -> Result<TokenHeader, TextError> {
    let mut writer = Writer::create(out, TokenHeader::new(tokenizer))?;
    for path in texts {
        for_each_text(path, |text| {
            writer.push(&tokenizer.encode(text)?)?;
            writer.push(&[tokenizer.end_of_text()])?;
            progress(text.len() as u64)
        })?;
    }
    writer.finish()
}

/// Calls `visit` with each text of a file. Texts are separated by [`END_OF_TEXT`]; empty ones are skipped.
pub fn for_each_text(
    path: &Path,
    mut visit: impl FnMut(&str) -> Result<(), TextError>,
) -> Result<(), TextError> {
    let failed = |source| TextError::ReadFile { path: path.to_owned(), source };
    let mut file = BufReader::new(std::fs::File::open(path).map_err(failed)?);
    let mut text = String::new();
    let mut bytes = Vec::new();
    let mut line = 0;
    let mut visit = |text: &str| if text.trim().is_empty() { Ok(()) } else { visit(text) };
    loop {
        bytes.clear();
        line += 1;
        if file.read_until(b'\n', &mut bytes).map_err(failed)? == 0 {
            return visit(&text);
        }
        let read = std::str::from_utf8(&bytes).map_err(|error| TextError::NotUtf8 {
            path: path.to_owned(),
            line,
            at: error.valid_up_to() + 1,
        })?;
        let mut parts = read.split(END_OF_TEXT);
        text.push_str(parts.next().unwrap_or_default());
        for part in parts {
            visit(&text)?;
            text.clear();
            // The line end after the mark belongs to the mark.
            text.push_str(if part == "\n" || part == "\r\n" { "" } else { part });
        }
    }
}

struct Writer {
    path: PathBuf,
    file: Replacement,
    header: TokenHeader,
}

impl Writer {
    fn create(path: &Path, header: TokenHeader) -> Result<Self, TextError> {
        // What is said of the file is said of what a link leads to.
        let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let failed = |source| TextError::WriteFile { path: path.to_owned(), source };
        leave_others_alone(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(failed)?;
        let mut file = Replacement::new(path).map_err(failed)?;
        file.write_all(&header.to_bytes()).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, header })
    }

    fn push(&mut self, tokens: &[u32]) -> Result<(), TextError> {
        let failed = |source| TextError::WriteFile { path: self.path.clone(), source };
        for token in tokens {
            self.file.write_all(&token.to_le_bytes()[..self.header.width]).map_err(failed)?;
        }
        self.header.count += tokens.len() as u64;
        Ok(())
    }

    fn finish(self) -> Result<TokenHeader, TextError> {
        let Self { path, mut file, header } = self;
        let failed = |source| TextError::WriteFile { path: path.clone(), source };
        if header.count == 0 {
            let what = "would have no tokens; try texts that are not empty".to_owned();
            return Err(TextError::BadFile { path, what });
        }
        file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header.to_bytes())).map_err(failed)?;
        leave_others_alone(&path)?;
        file.commit(Durability::Disk).map_err(failed)?;
        Ok(header)
    }
}

/// An error if something exists at the path that is neither a file of tokens nor an empty file.
fn leave_others_alone(path: &Path) -> Result<(), TextError> {
    let failed = |source| TextError::ReadFile { path: path.to_owned(), source };
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    let mut begin = Vec::new();
    if found.is_file() {
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(MAGIC.len() as u64).read_to_end(&mut begin).map_err(failed)?;
    }
    if found.is_file() && (begin.is_empty() || begin == MAGIC) {
        return Ok(());
    }
    Err(TextError::AlreadyExists { path: path.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> (tempfile::TempDir, PathBuf, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let (from, out) = (folder.path().join("t.txt"), folder.path().join("t.tokens"));
        std::fs::write(&from, text).unwrap();
        write_tokens(&[from.clone(), from], &GptTokenizer::bytes(), &out, |_| Ok(())).unwrap();
        let bytes = std::fs::read(&out).unwrap();
        (folder, out, bytes)
    }

    #[test]
    fn each_text_ends_with_the_end_of_a_text() {
        let (folder, _, bytes) = written("ab\n<|endoftext|>\nc<|endoftext|><|endoftext|>\n");
        let tokens = bytes[TokenHeader::LEN..].as_chunks().0.iter().map(|token| u16::from_le_bytes(*token));
        let once = [97, 98, 10, 256, 99, 256];
        assert!(tokens.eq([once, once].concat()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no other files are left");
    }

    #[test]
    fn damaged_and_other_files_cannot_be_opened() {
        let (_folder, path, bytes) = written("some text");
        let error = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            TokenHeader::open(&path).unwrap_err().to_string()
        };
        assert!(
            error(&bytes[..bytes.len() - 1]).contains("is incomplete: it has"),
            "{}",
            error(&bytes[..50])
        );
        assert!(error(&[&bytes[..], &[0, 0]].concat()).contains("is incomplete"));
        assert!(error(b"some text").contains("is not a file of tokens; try drumline data tokens"));
        assert!(error(&[]).contains("is not a file of tokens"));
        let changed = |at: usize| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            error(&bytes)
        };
        assert!(changed(8).contains("has version 0"));
        assert!([12, 16, 24, 33, 39].iter().all(|at| changed(*at).contains("damaged header")));
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(TokenHeader::open(&path).unwrap().count, 20, "control");
        assert!(TokenHeader::open(Path::new("/none")).unwrap_err().to_string().starts_with("cannot read"));
    }

    #[test]
    fn a_text_that_cannot_be_read_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let (from, out) = (folder.path().join("t.txt"), folder.path().join("t.tokens"));
        for (bytes, expected) in [(&b"a\nb\xff\n"[..], "line 2 of"), (b" \n", "would have no tokens")] {
            std::fs::write(&from, bytes).unwrap();
            let error = write_tokens(std::slice::from_ref(&from), &GptTokenizer::bytes(), &out, |_| Ok(()))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn only_files_of_tokens_are_replaced() {
        let (folder, out, first) = written("some text");
        let from = folder.path().join("t.txt");
        let write =
            |out: &Path| write_tokens(std::slice::from_ref(&from), &GptTokenizer::bytes(), out, |_| Ok(()));
        write(&out).unwrap();
        assert!(std::fs::read(&out).unwrap().len() < first.len(), "of one text instead of two");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&out, &link).unwrap();
        write(&link).unwrap();
        assert!(link.is_symlink(), "its target is replaced");
        for other in [&from, folder.path()] {
            let error = write(other).unwrap_err().to_string();
            assert!(error.contains("was not overwritten"), "{error}");
        }
        assert_eq!(std::fs::read(&from).unwrap(), b"some text");
        std::fs::write(&out, "").unwrap();
        write(&out).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "no other files are left");
    }

    #[test]
    fn work_that_is_stopped_leaves_the_old_file() {
        let (folder, out, bytes) = written("one<|endoftext|>two");
        let (from, mut read) = (folder.path().join("t.txt"), Vec::new());
        let stopped = write_tokens(&[from], &GptTokenizer::bytes(), &out, |len| {
            read.push(len);
            if read.len() == 2 { Err(TextError::Stopped) } else { Ok(()) }
        });
        assert!(matches!(stopped, Err(TextError::Stopped)) && read == [3, 3], "{stopped:?}, {read:?}");
        assert_eq!(std::fs::read(&out).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
