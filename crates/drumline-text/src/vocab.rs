//! Words and their ids.
//!
//! The first four ids belong to no word of the text, in the order of NJUNMT-pytorch's dev branch: `<PAD>` 0, `<EOS>` 1,
//! `<BOS>` 2, `<UNK>` 3. Words follow, the most frequent first. In files the four are not listed: the first word has id 0
//! there and 4 here.

use crate::beside::write_whole;
use crate::lines::for_each_line;
use crate::{TextError, TextError::BadFile};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

/// The words that each vocabulary begins with, by their ids.
const SPECIALS: [&str; 4] = ["<PAD>", "<EOS>", "<BOS>", "<UNK>"];

/// How often each word occurs.
///
/// ```
/// use drumline_text::{Vocabulary, VocabularyOptions, WordCounts};
///
/// let mut counts = WordCounts::default();
/// counts.add(["the", "house", "the"]);
/// let vocabulary = Vocabulary::build(counts, &VocabularyOptions::default());
/// assert_eq!(vocabulary.len(), 6);
/// assert_eq!(vocabulary.id("the"), 4);
/// assert_eq!(vocabulary.id("tree"), Vocabulary::UNK);
/// assert_eq!(vocabulary.word(5), "house");
/// ```
#[derive(Debug, Clone, Default)]
pub struct WordCounts {
    counts: HashMap<String, u64>,
}

impl WordCounts {
    /// Count the words of a sentence.
    pub fn add<W: AsRef<str>>(&mut self, words: impl IntoIterator<Item = W>) {
        for word in words {
            match self.counts.get_mut(word.as_ref()) {
                Some(count) => *count += 1,
                None => drop(self.counts.insert(word.as_ref().to_owned(), 1)),
            }
        }
    }
}

/// Which words are worth an id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VocabularyOptions {
    /// Ids in all, the first four among them, as NJUNMT counts; `None`: no limit.
    pub max_n_words: Option<usize>,
    /// Rarer words are left out; 0 keeps all.
    pub min_count: u64,
}

/// Words and their ids, from 0 without gaps. It travels between ranks as any object does (`serde`), or as a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(String, u64)>", into = "Vec<(String, u64)>")]
pub struct Vocabulary {
    /// By id, with their counts; 0 where they are not known.
    words: Vec<(String, u64)>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Fills up sentences that are shorter than others of their batch.
    pub const PAD: u32 = 0;
    /// Ends a sentence.
    pub const EOS: u32 = 1;
    /// Begins a sentence.
    pub const BOS: u32 = 2;
    /// Stands for all words that are not listed.
    pub const UNK: u32 = 3;

    /// The most frequent words first; among equals by their letters, so that all ranks have the same ids.
    pub fn build(counts: WordCounts, options: &VocabularyOptions) -> Self {
        let mut words: Vec<_> = counts.counts.into_iter().filter(|(_, n)| *n >= options.min_count).collect();
        words.sort_unstable_by(|(a, n), (b, m)| m.cmp(n).then_with(|| a.cmp(b)));
        let mut vocabulary = Self::of(words);
        vocabulary.cut(options.max_n_words);
        vocabulary
    }

    /// Words in the order of their ids. Those that are there already are passed over, the first four among them.
    pub fn of(words: impl IntoIterator<Item = (String, u64)>) -> Self {
        let mut vocabulary = Self { words: Vec::new(), ids: HashMap::new() };
        let specials = SPECIALS.map(|word| (word.to_owned(), 0));
        for (word, count) in specials.into_iter().chain(words) {
            if !vocabulary.ids.contains_key(&word) {
                vocabulary.ids.insert(word.clone(), vocabulary.words.len() as u32);
                vocabulary.words.push((word, count));
            }
        }
        vocabulary
    }

    /// Read NJUNMT's files: `{"word": [id, count], …}` or `{"word": id, …}` if the name ends in `.json`, else lines of
    /// `word` or `word count`. `max_n_words` counts the first four ids, too.
    pub fn read(path: impl AsRef<Path>, max_n_words: Option<usize>) -> Result<Self, TextError> {
        let path = path.as_ref();
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let words = if is_json { read_json(path) } else { read_lines(path) };
        let words = words.map_err(|error| match error {
            TextError::ReadFile { path, source } => TextError::NoVocabulary { path, source },
            other => other,
        })?;
        let mut vocabulary = Self::of(words);
        vocabulary.cut(max_n_words);
        Ok(vocabulary)
    }

    /// Write it, whole or not at all: as JSON if the name ends in `.json`, else as lines of `word count`.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TextError> {
        let path = path.as_ref();
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        write_whole(path, if is_json { self.to_json() } else { self.to_lines() }.as_bytes())
    }

    pub(crate) fn to_json(&self) -> String {
        let entry = |(id, (word, count)): (usize, &(String, u64))| {
            format!(" {}: [{id}, {count}]", serde_json::Value::from(word.as_str()))
        };
        let entries: Vec<_> = self.listed().iter().enumerate().map(entry).collect();
        format!("{{\n{}\n}}\n", entries.join(",\n"))
    }

    fn to_lines(&self) -> String {
        self.listed().iter().map(|(word, count)| format!("{word} {count}\n")).collect()
    }

    /// What stands in files.
    fn listed(&self) -> &[(String, u64)] {
        &self.words[SPECIALS.len()..]
    }

    /// Ids in all, the first four among them: the size of an embedding.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are no words but the first four.
    pub fn is_empty(&self) -> bool {
        self.words.len() == SPECIALS.len()
    }

    /// The id of a word; [`Self::UNK`] if it has none.
    pub fn id(&self, word: &str) -> u32 {
        self.ids.get(word).copied().unwrap_or(Self::UNK)
    }

    /// The word of an id; `<UNK>` behind the last.
    pub fn word(&self, id: u32) -> &str {
        self.words.get(id as usize).map_or(SPECIALS[Self::UNK as usize], |(word, _)| word)
    }

    /// How often a word was counted; 0 if that is not known.
    pub fn count(&self, id: u32) -> u64 {
        self.words.get(id as usize).map_or(0, |(_, count)| *count)
    }

    fn cut(&mut self, max_n_words: Option<usize>) {
        let keep = max_n_words.unwrap_or(usize::MAX).max(SPECIALS.len());
        for (word, _) in self.words.drain(keep.min(self.words.len())..) {
            self.ids.remove(&word);
        }
    }
}

impl From<Vec<(String, u64)>> for Vocabulary {
    fn from(words: Vec<(String, u64)>) -> Self {
        Self::of(words)
    }
}

impl From<Vocabulary> for Vec<(String, u64)> {
    fn from(vocabulary: Vocabulary) -> Self {
        vocabulary.words
    }
}

/// What stands beside a word.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Id(u32),
    IdAndCount(u32, u64),
}

fn read_json(path: &Path) -> Result<Vec<(String, u64)>, TextError> {
    let bytes =
        std::fs::read(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
    let entries: BTreeMap<String, Entry> = serde_json::from_slice(&bytes).map_err(|error| BadFile {
        path: path.to_owned(),
        what: format!("is no vocabulary: {error}; expected {{\"word\": [id, count], …}}"),
    })?;
    let mut words: Vec<_> = entries
        .into_iter()
        .map(|(word, entry)| match entry {
            Entry::Id(id) => (id, word, 0),
            Entry::IdAndCount(id, count) => (id, word, count),
        })
        .collect();
    words.sort();
    let bad = |what| BadFile { path: path.to_owned(), what };
    for (expected, (id, word, _)) in words.iter().enumerate() {
        if *id as usize != expected {
            return Err(bad(format!(
                "gives id {id} to `{word}`, expected {expected}: ids go from 0 without gaps, each once; try to build it again"
            )));
        }
        if SPECIALS.contains(&word.as_str()) {
            return Err(bad(format!("lists `{word}`, which each vocabulary has by itself; try without it")));
        }
    }
    Ok(words.into_iter().map(|(_, word, count)| (word, count)).collect())
}

fn read_lines(path: &Path) -> Result<Vec<(String, u64)>, TextError> {
    let (mut words, mut seen) = (Vec::new(), HashMap::new());
    for_each_line(path, |line, text| {
        let bad = |what| Err(TextError::BadLine { path: path.to_owned(), line, what });
        let fields: Vec<_> = text.split_whitespace().collect();
        let (word, count) = match fields[..] {
            [word] => (word, Ok(0)),
            [word, count] => (word, count.parse()),
            _ => return bad(format!("has {} fields, expected `word` or `word count`", fields.len())),
        };
        let Ok(count) = count else {
            return bad(format!("has `{}` beside its word, expected a count", fields[1]));
        };
        if SPECIALS.contains(&word) {
            return bad(format!("lists `{word}`, which each vocabulary has by itself; try without it"));
        }
        if let Some(first) = seen.insert(word.to_owned(), line) {
            return bad(format!("lists `{word}`, as line {first} does; try to build it again"));
        }
        words.push((word.to_owned(), count));
        Ok(())
    })?;
    match words.is_empty() {
        true => {
            Err(TextError::ReadFile { path: path.to_owned(), source: io::ErrorKind::UnexpectedEof.into() })
        }
        false => Ok(words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vocabulary {
        let mut counts = WordCounts::default();
        counts.add("b a c a \"q\" d@@ é a b".split(' '));
        Vocabulary::build(counts, &VocabularyOptions::default())
    }

    fn read(name: &str, text: &[u8]) -> Result<Vocabulary, TextError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Vocabulary::read(path, None)
    }

    #[test]
    fn frequent_words_first_and_equals_by_letters() {
        let vocabulary = sample();
        let words: Vec<_> = (0..vocabulary.len() as u32).map(|id| vocabulary.word(id)).collect();
        assert_eq!(words, ["<PAD>", "<EOS>", "<BOS>", "<UNK>", "a", "b", "\"q\"", "c", "d@@", "é"]);
        assert_eq!((vocabulary.count(4), vocabulary.count(5), vocabulary.count(99)), (3, 2, 0));
        assert_eq!((vocabulary.id("<EOS>"), vocabulary.word(99)), (Vocabulary::EOS, "<UNK>"));
    }

    #[test]
    fn files_bring_back_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["vocab.json", "vocab.txt"] {
            let path = folder.path().join(name);
            sample().write(&path).unwrap();
            assert_eq!(Vocabulary::read(&path, None).unwrap(), sample());
            let cut = Vocabulary::read(&path, Some(6)).unwrap();
            assert_eq!((cut.len(), cut.id("b"), cut.id("c")), (6, 5, Vocabulary::UNK));
        }
        let options = VocabularyOptions { max_n_words: Some(5), min_count: 0 };
        let mut counts = WordCounts::default();
        counts.add(["x", "y", "x"]);
        assert_eq!(Vocabulary::build(counts.clone(), &options).len(), 5);
        assert_eq!(
            Vocabulary::build(counts, &VocabularyOptions { min_count: 2, max_n_words: None }).len(),
            5
        );
        let json = serde_json::to_string(&sample()).unwrap();
        assert_eq!(serde_json::from_str::<Vocabulary>(&json).unwrap(), sample());
    }

    #[test]
    fn njunmts_formats_are_read() {
        for (name, text) in [
            ("a.json", r#"{"the": [0, 20], "house": [1, 7]}"#),
            ("a.json", r#"{"house": 1, "the": 0}"#),
            ("a.txt", "the\nhouse\n"),
            ("a.txt", "the 20\r\nhouse\t7"),
        ] {
            let vocabulary = read(name, text.as_bytes()).unwrap();
            assert_eq!((vocabulary.len(), vocabulary.id("the"), vocabulary.id("house")), (6, 4, 5), "{text}");
        }
    }

    #[test]
    fn bad_files_are_told_by_name_and_line() {
        for (name, text, expected) in [
            ("a.json", &b"{\"a\": [0, 1], \"b\": [2, 1]}"[..], "gives id 2 to `b`, expected 1"),
            ("a.json", b"{\"a\": 0, \"b\": 0}", "gives id 0 to `b`, expected 1"),
            ("a.json", b"{\"a\": 0,\n \"b\": [}", "is no vocabulary"),
            ("a.json", b"{\"<PAD>\": 0}", "lists `<PAD>`"),
            ("a.txt", b"a\nb\na\n", "line 3 of"),
            ("a.txt", b"a 1\n\nb 1\n", "line 2 of"),
            ("a.txt", b"a one\n", "expected a count"),
            ("a.txt", b"a\n<UNK>\n", "lists `<UNK>`"),
            ("a.txt", b"a\nb\xc3\n", "line 2 of"),
            ("a.txt", b"", "cannot read the vocabulary"),
        ] {
            let error = read(name, text).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(name), "{error}");
        }
        let error = Vocabulary::read("/nonexistent/vocab.json", None).unwrap_err().to_string();
        assert!(error.contains("cannot read the vocabulary") && error.contains("; try"), "{error}");
    }
}
