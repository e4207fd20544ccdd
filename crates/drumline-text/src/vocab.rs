//! Words and their ids.
//!
//! The first four ids are special tokens, in the order of NJUNMT-pytorch's dev branch: `<PAD>` 0, `<EOS>` 1, `<BOS>` 2,
//! `<UNK>` 3. The words follow, the most frequent first. Files do not list the special tokens: the first word has id 0 in a
//! file and id 4 here.

use crate::beside::write_whole;
use crate::lines::for_each_line;
use crate::{TextError, TextError::BadFile};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

/// The special tokens, by id.
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
    /// Counts the words of a sentence.
    pub fn add<W: AsRef<str>>(&mut self, words: impl IntoIterator<Item = W>) {
        for word in words {
            match self.counts.get_mut(word.as_ref()) {
                Some(count) => *count += 1,
                None => drop(self.counts.insert(word.as_ref().to_owned(), 1)),
            }
        }
    }
}

/// Which words get an id.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VocabularyOptions {
    /// The most ids, including the four special tokens, as NJUNMT counts. `None` sets no limit.
    pub max_n_words: Option<usize>,
    /// Words that occur less often are left out; 0 keeps all.
    pub min_count: u64,
}

/// Words and their ids, from 0 without gaps. Ranks can exchange it as an object (`serde`) or as a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(String, u64)>", into = "Vec<(String, u64)>")]
pub struct Vocabulary {
    /// The words and their counts, by id. A count is 0 if it is not known.
    words: Vec<(String, u64)>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    /// Pads sentences to the longest of their batch.
    pub const PAD: u32 = 0;
    /// Ends a sentence.
    pub const EOS: u32 = 1;
    /// Begins a sentence.
    pub const BOS: u32 = 2;
    /// Stands for all words without an id.
    pub const UNK: u32 = 3;

    /// Gives ids to counted words, the most frequent first. Words with equal counts are in alphabetical order, so that all ranks
    /// have the same ids.
    pub fn build(counts: WordCounts, options: &VocabularyOptions) -> Self {
        let mut words: Vec<_> = counts.counts.into_iter().filter(|(_, n)| *n >= options.min_count).collect();
        words.sort_unstable_by(|(a, n), (b, m)| m.cmp(n).then_with(|| a.cmp(b)));
        let mut vocabulary = Self::of(words);
        vocabulary.cut(options.max_n_words);
        vocabulary
    }

    /// A vocabulary of these words, in the order of their ids. Repeated words and the special tokens are skipped.
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

    /// Reads a file in one of NJUNMT's formats: `{"word": [id, count], …}` or `{"word": id, …}` if the name ends in `.json`, else
    /// lines of `word` or `word count`. `max_n_words` includes the four special tokens.
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

    /// Writes the vocabulary atomically: as JSON if the name ends in `.json`, else as lines of `word count`.
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

    /// The words that files list: all but the special tokens.
    fn listed(&self) -> &[(String, u64)] {
        &self.words[SPECIALS.len()..]
    }

    /// The number of ids, including the four special tokens: the size of an embedding.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are only the special tokens.
    pub fn is_empty(&self) -> bool {
        self.words.len() == SPECIALS.len()
    }

    /// The id of a word; [`Self::UNK`] if it has none.
    pub fn id(&self, word: &str) -> u32 {
        self.ids.get(word).copied().unwrap_or(Self::UNK)
    }

    /// The word of an id; `<UNK>` for an id past the end.
    pub fn word(&self, id: u32) -> &str {
        self.words.get(id as usize).map_or(SPECIALS[Self::UNK as usize], |(word, _)| word)
    }

    /// The count of a word; 0 if it is not known.
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

/// The value of a word in a JSON file.
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
        what: format!("is not a vocabulary: {error}; expected {{\"word\": [id, count], …}}"),
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
                "gives id {id} to `{word}`, expected {expected}: ids are numbered from 0 without gaps, each used once; try \
                 building it again"
            )));
        }
        if SPECIALS.contains(&word.as_str()) {
            return Err(bad(format!("lists `{word}`, which every vocabulary has anyway; try removing it")));
        }
    }
    Ok(words.into_iter().map(|(_, word, count)| (word, count)).collect())
}

fn read_lines(path: &Path) -> Result<Vec<(String, u64)>, TextError> {
    let mut words = Vec::new();
    let mut seen = HashMap::new();
    for_each_line(path, |line, text| {
        let bad = |what| Err(TextError::BadLine { path: path.to_owned(), line, what });
        let fields: Vec<_> = text.split_whitespace().collect();
        let (word, count) = match fields[..] {
            [word] => (word, Ok(0)),
            [word, count] => (word, count.parse()),
            _ => return bad(format!("has {} fields, expected `word` or `word count`", fields.len())),
        };
        let Ok(count) = count else {
            return bad(format!("has `{}` after its word, expected a count", fields[1]));
        };
        if SPECIALS.contains(&word) {
            return bad(format!("lists `{word}`, which every vocabulary has anyway; try removing it"));
        }
        if let Some(first) = seen.insert(word.to_owned(), line) {
            return bad(format!("lists `{word}`, which line {first} lists already; try building it again"));
        }
        words.push((word.to_owned(), count));
        Ok(())
    })?;
    if words.is_empty() {
        let source = io::ErrorKind::UnexpectedEof.into();
        return Err(TextError::ReadFile { path: path.to_owned(), source });
    }
    Ok(words)
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
    fn words_are_ordered_by_count_and_then_by_alphabet() {
        let vocabulary = sample();
        let words: Vec<_> = (0..vocabulary.len() as u32).map(|id| vocabulary.word(id)).collect();
        assert_eq!(words, ["<PAD>", "<EOS>", "<BOS>", "<UNK>", "a", "b", "\"q\"", "c", "d@@", "é"]);
        assert_eq!((vocabulary.count(4), vocabulary.count(5), vocabulary.count(99)), (3, 2, 0));
        assert_eq!((vocabulary.id("<EOS>"), vocabulary.word(99)), (Vocabulary::EOS, "<UNK>"));
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
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
    fn the_formats_of_njunmt_are_read() {
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
    fn errors_name_the_file_and_line() {
        for (name, text, expected) in [
            ("a.json", &b"{\"a\": [0, 1], \"b\": [2, 1]}"[..], "gives id 2 to `b`, expected 1"),
            ("a.json", b"{\"a\": 0, \"b\": 0}", "gives id 0 to `b`, expected 1"),
            ("a.json", b"{\"a\": 0,\n \"b\": [}", "is not a vocabulary"),
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
