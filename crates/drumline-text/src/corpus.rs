//! Parallel text: two files in which line n of one is the translation of line n of the other.
//!
//! ```text
//!   source file ─ a pass ─▶ lines, lengths ┐
//!   target file ─ a pass ─▶ lines, lengths ┴▶ pairs that remain: 0, 1, 2, …      both passes at once
//! ```
//! Pairs with an empty side, or with a side over its limit, are left out and counted. A corpus needs about 10 bytes of memory
//! per pair, whatever the size of the files. All ranks that open the same files see the same pairs.

use crate::{LineFile, TextError, Tokens};
use std::fmt;
use std::path::Path;
use std::thread;

/// One side of a corpus.
#[derive(Debug, Clone, Default)]
pub struct Side {
    /// How its sentences are split.
    pub tokens: Tokens,
    /// The most tokens that a sentence may have; `None` sets no limit.
    pub max_len: Option<u32>,
}

/// How a corpus is read. By default sentences are split into words and may have any length.
#[derive(Debug, Clone, Default)]
pub struct CorpusOptions {
    /// The side that is translated.
    pub source: Side,
    /// The side with the translations.
    pub target: Side,
}

/// The number of pairs that a corpus leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LeftOut {
    /// Pairs with a side without tokens.
    pub empty: usize,
    /// Pairs with a side of more tokens than its `max_len`.
    pub too_long: usize,
    /// All pairs in the files, left out or not.
    pub of: usize,
}

impl LeftOut {
    /// Whether no pair is left out.
    pub fn is_none(&self) -> bool {
        self.empty + self.too_long == 0
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { empty, too_long, of } = self;
        write!(
            f,
            "{} of {of} pairs left out ({empty} with an empty side, {too_long} over max_len)",
            empty + too_long
        )
    }
}

/// Two files, pair by pair, in any order and from several threads.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let (source, target) = (folder.path().join("train.en"), folder.path().join("train.de"));
/// use drumline_text::{CorpusOptions, ParallelCorpus};
///
/// std::fs::write(&source, "a house\n\nthe old tree\n")?;
/// std::fs::write(&target, "ein Haus\nnichts\nder Baum\n")?;
/// let corpus = ParallelCorpus::open(&source, &target, &CorpusOptions::default())?;
/// assert_eq!(corpus.lengths(), [(2, 2), (3, 2)]);
/// assert_eq!(corpus.pair(1)?, ("the old tree".to_owned(), "der Baum".to_owned()));
/// assert_eq!(corpus.left_out().to_string(), "1 of 3 pairs left out (1 with an empty side, 0 over max_len)");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ParallelCorpus {
    source: LineFile,
    target: LineFile,
    lengths: Vec<(u32, u32)>,
    /// The lines of pairs that are left out, in order.
    gaps: Vec<u32>,
    left_out: LeftOut,
}

impl ParallelCorpus {
    /// Reads both files once, to check them and to find the lengths of their sentences.
    pub fn open(
        source: impl AsRef<Path>,
        target: impl AsRef<Path>,
        options: &CorpusOptions,
    ) -> Result<Self, TextError> {
        let source = source.as_ref();
        let target = target.as_ref();
        let (source, target) = thread::scope(|scope| {
            let source = scope.spawn(|| measure(source, &options.source.tokens));
            let target = measure(target, &options.target.tokens);
            (source.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), target)
        });
        let (source, source_lengths) = source?;
        let (target, target_lengths) = target?;
        if source.len() != target.len() {
            return Err(TextError::UnequalLines {
                source_path: source.path().to_owned(),
                source_lines: source.len() as u64,
                target_path: target.path().to_owned(),
                target_lines: target.len() as u64,
            });
        }
        let lengths = source_lengths.into_iter().zip(target_lengths);
        let mut corpus =
            Self { source, target, lengths: Vec::new(), gaps: Vec::new(), left_out: LeftOut::default() };
        corpus.choose(lengths, options);
        if corpus.is_empty() {
            let path = corpus.source.path().to_owned();
            return Err(TextError::NothingRemains { path, left_out: corpus.left_out.to_string() });
        }
        Ok(corpus)
    }

    fn choose(&mut self, lengths: impl Iterator<Item = (u32, u32)>, options: &CorpusOptions) {
        let limit = |side: &Side| side.max_len.unwrap_or(u32::MAX);
        let source_limit = limit(&options.source);
        let target_limit = limit(&options.target);
        self.left_out.of = self.source.len();
        for (line, (source, target)) in (0..).zip(lengths) {
            let empty = source == 0 || target == 0;
            let too_long = source > source_limit || target > target_limit;
            if empty || too_long {
                self.gaps.push(line);
                self.left_out.empty += usize::from(empty);
                self.left_out.too_long += usize::from(!empty);
            } else {
                self.lengths.push((source, target));
            }
        }
    }

    /// The number of pairs that are not left out.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Always false, since a corpus without pairs cannot be opened.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The number of tokens of each pair's source and target, as [`BatchPlan`](crate::BatchPlan) takes them.
    pub fn lengths(&self) -> &[(u32, u32)] {
        &self.lengths
    }

    /// What is left out. Rank 0 should report it once.
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// The sentences of a pair, unchanged from the files.
    pub fn pair(&self, index: usize) -> Result<(String, String), TextError> {
        if index >= self.len() {
            let path = self.source.path().to_owned();
            return Err(TextError::OutOfRange { path, index, len: self.len() });
        }
        let line = self.line_of(index);
        Ok((self.source.line(line)?, self.target.line(line)?))
    }

    /// The line of a pair in the files, from 0.
    pub fn line_of(&self, index: usize) -> usize {
        // A binary search for the number of gaps before the pair. Before gap k, which is at line `gaps[k]`, there are
        // `gaps[k] - k` pairs, and this number never decreases with k.
        let mut low = 0;
        let mut high = self.gaps.len();
        while low < high {
            let middle = low.midpoint(high);
            if self.gaps[middle] as usize - middle <= index {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        index + low
    }

    /// A checksum of the pairs' lengths and lines and of the files' sizes, for ranks to compare. If it is equal on all ranks, they
    /// make the same batches, except for a collision. It does not see a word that is replaced by another of the same length.
    pub fn fingerprint(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for bytes in [self.source.num_bytes(), self.target.num_bytes()] {
            crc.update(&bytes.to_le_bytes());
        }
        for (source, target) in &self.lengths {
            crc.update(&(u64::from(*source) << 32 | u64::from(*target)).to_le_bytes());
        }
        self.gaps.iter().for_each(|line| crc.update(&line.to_le_bytes()));
        crc.finalize()
    }
}

/// Opens a file, and counts the tokens of each line.
fn measure(path: &Path, tokens: &Tokens) -> Result<(LineFile, Vec<u32>), TextError> {
    let mut lengths = Vec::new();
    let file = LineFile::open_with(path, |line| {
        if lengths.len() == u32::MAX as usize {
            let what = format!("has more than {} lines; try splitting it", u32::MAX);
            return Err(TextError::BadFile { path: path.to_owned(), what });
        }
        lengths.push(u32::try_from(tokens.count(line)?).unwrap_or(u32::MAX));
        Ok(())
    })?;
    Ok((file, lengths))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::PathBuf;

    fn files(source: &[u8], target: &[u8]) -> (tempfile::TempDir, [PathBuf; 2]) {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["train.src", "train.tgt"].map(|name| folder.path().join(name));
        std::fs::write(&paths[0], source).unwrap();
        std::fs::write(&paths[1], target).unwrap();
        (folder, paths)
    }

    fn open(source: &str, target: &str, max_len: Option<u32>) -> Result<ParallelCorpus, TextError> {
        let (_folder, [source, target]) = files(source.as_bytes(), target.as_bytes());
        let side = Side { max_len, ..Side::default() };
        ParallelCorpus::open(source, target, &CorpusOptions { source: side.clone(), target: side })
    }

    proptest! {
        #[test]
        fn only_pairs_within_the_limits_remain(lengths in prop::collection::vec((0..6_u32, 0..6_u32), 1..60)) {
            let text = |side: fn(&(u32, u32)) -> u32| -> String {
                lengths.iter().enumerate().map(|(i, l)| format!("{i} ").repeat(side(l) as usize) + "\n").collect()
            };
            let fits = |length: u32| (1..=4).contains(&length);
            let expected: Vec<_> = (0..).zip(&lengths).filter(|(_, l)| fits(l.0) && fits(l.1)).collect();
            match open(&text(|l| l.0), &text(|l| l.1), Some(4)) {
                Err(error) => {
                    prop_assert!(expected.is_empty() && error.to_string().contains("no sentences remain"));
                }
                Ok(corpus) => {
                    prop_assert_eq!(corpus.len(), expected.len());
                    let left_out = corpus.left_out();
                    prop_assert_eq!(left_out.empty + left_out.too_long + corpus.len(), lengths.len());
                    for (index, (line, lengths)) in expected.into_iter().enumerate() {
                        prop_assert_eq!(corpus.line_of(index), line);
                        prop_assert_eq!(&corpus.lengths()[index], lengths);
                        let (source, target) = corpus.pair(index).unwrap();
                        prop_assert_eq!(source.split(' ').next().unwrap(), line.to_string());
                        prop_assert_eq!(target.split_whitespace().count(), lengths.1 as usize);
                    }
                    prop_assert!(corpus.pair(corpus.len()).is_err());
                }
            }
        }
    }

    #[test]
    fn errors_name_the_file_and_line() {
        let error = open("a\nb\nc\n", "a\nb\n", None).unwrap_err().to_string();
        assert!(error.contains("train.src\" has 3 lines") && error.contains("train.tgt\" has 2"), "{error}");
        for (source, target) in [(&b"a\nb\n"[..], &b"a\n\xfe\n"[..]), (b"a\n\xfe\n", b"a\nb\n")] {
            let (_folder, [source, target]) = files(source, target);
            let error = ParallelCorpus::open(source, target, &CorpusOptions::default()).unwrap_err();
            assert!(error.to_string().contains("line 2 of"), "{error}");
        }
        let error = open("", "", None).unwrap_err().to_string();
        assert!(error.contains("no sentences remain"), "{error}");
    }

    #[test]
    fn other_pairs_have_another_fingerprint() {
        let text = "a b\n\nc\nd e f\n";
        let print = |text: &str, max_len| open(text, text, max_len).unwrap().fingerprint();
        assert_eq!(print(text, None), print(text, None));
        assert_ne!(print(text, None), print(text, Some(2)));
        assert_ne!(print(text, None), print("a b\nc\n\nd e f\n", None));
        assert_ne!(print(text, None), print("aa b\n\nc\nd e f\n", None));
    }
}
