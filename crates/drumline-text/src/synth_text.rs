//! Two synthetic tasks, for classifiers and taggers, for use where no data can be downloaded.
//!
//! ```text
//!   train.csv     text,label
//!                 "the plot was not very dull , and we saw it in Corby .",positive
//!   train.conll   Ada B-PER     Grove I-PER     left O     Corby B-ORG     Bank I-ORG     . O          one word per line
//! ```
//! Single words do not decide a label. "not" reverses an opinion, but also occurs without one. The name of a company may begin with
//! that of a place or of a person. No text is in two of the parts train, dev and test.

mod names;
mod opinions;

use crate::TextError;
use crate::beside::write_once;
use crate::random::Random;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// The sizes of the parts, and the seed. Both tasks have the same sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthTextOptions {
    /// The number of texts for training.
    pub train: usize,
    /// The number of texts for validation.
    pub dev: usize,
    /// The number of texts for the test.
    pub test: usize,
    /// The seed of the texts.
    pub seed: u64,
}

impl Default for SynthTextOptions {
    fn default() -> Self {
        Self { train: 3000, dev: 400, test: 400, seed: 1234 }
    }
}

// The streams of random numbers.
const OPINIONS: u64 = 0;
const NAMES: u64 = 1;

/// Writes `train`, `dev` and `test`, each as `.csv` (fields `text` and `label`) and as `.conll` (columns of words and of BIO tags).
///
/// The same options give the same bytes. It is an error if a file exists with different content; it is not overwritten.
///
/// ```
/// use drumline_text::synth_text::{self, SynthTextOptions};
/// use drumline_text::table::{ConllOptions, Fields, Table, read_conll};
///
/// let folder = tempfile::tempdir()?;
/// synth_text::write(folder.path(), &SynthTextOptions { train: 50, ..SynthTextOptions::default() })?;
/// let table = Table::read(folder.path().join("train.csv"), &Fields::labelled("text", "label"))?;
/// let options = ConllOptions { tag: 1, ..ConllOptions::default() };
/// let tagged = read_conll(folder.path().join("train.conll"), &options)?;
/// assert_eq!((table.examples.len(), tagged.len()), (50, 50));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(folder: impl AsRef<Path>, options: &SynthTextOptions) -> Result<(), TextError> {
    let folder = folder.as_ref();
    let SynthTextOptions { train, dev, test, seed } = *options;
    // The small parts come first, so that they do not depend on the size of the large one.
    let parts = [("test", test), ("dev", dev), ("train", train)];
    TextError::if_empty(parts, "texts")?;
    fs::create_dir_all(folder).map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
    let mut classified = Distinct::new(Random::new(seed, OPINIONS), opinions::draw);
    let mut tagged = Distinct::new(Random::new(seed, NAMES), names::draw);
    for (name, texts) in parts {
        write_once(&folder.join(format!("{name}.csv")), &csv(&classified.take(texts)))?;
        write_once(&folder.join(format!("{name}.conll")), conll(&tagged.take(texts)).as_bytes())?;
    }
    Ok(())
}

/// Draws texts, each only once.
struct Distinct<T> {
    random: Random,
    draw: fn(&mut Random) -> T,
    seen: HashSet<T>,
}

impl<T: Clone + Eq + std::hash::Hash> Distinct<T> {
    fn new(random: Random, draw: fn(&mut Random) -> T) -> Self {
        Self { random, draw, seen: HashSet::new() }
    }

    fn take(&mut self, count: usize) -> Vec<T> {
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let text = (self.draw)(&mut self.random);
            if self.seen.insert(text.clone()) {
                taken.push(text);
            }
        }
        taken
    }
}

/// A text to classify.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Opinion {
    text: String,
    label: &'static str,
}

/// Words and their tags.
type Tagged = Vec<(&'static str, String)>;

fn csv(texts: &[Opinion]) -> Vec<u8> {
    let mut lines = csv::Writer::from_writer(Vec::new());
    let header = [["text", "label"]].into_iter();
    for row in header.chain(texts.iter().map(|Opinion { text, label }| [text.as_str(), label])) {
        lines.write_record(row).expect("two columns, in memory");
    }
    lines.into_inner().expect("in memory")
}

fn conll(sentences: &[Tagged]) -> String {
    let line = |(word, tag): &(&str, String)| format!("{word} {tag}\n");
    let sentences: Vec<String> = sentences.iter().map(|words| words.iter().map(line).collect()).collect();
    sentences.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{ConllOptions, Fields, Table, read_conll};

    const SMALL: SynthTextOptions = SynthTextOptions { train: 600, dev: 40, test: 50, seed: 1 };

    fn texts(folder: &Path, part: &str) -> Vec<(String, String)> {
        let table =
            Table::read(folder.join(format!("{part}.csv")), &Fields::labelled("text", "label")).unwrap();
        let rows = table.examples.into_iter();
        rows.map(|mut example| (example.texts.remove(0), example.label.unwrap())).collect()
    }

    #[test]
    fn parts_share_no_text_and_depend_on_the_seed() {
        let made = [SMALL, SMALL, SynthTextOptions { seed: 2, ..SMALL }].map(|options| {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &options).unwrap();
            folder
        });
        let bytes = |number: usize, name: &str| fs::read(made[number].path().join(name)).unwrap();
        for name in ["train.csv", "train.conll", "dev.csv", "test.conll"] {
            assert!(bytes(0, name) == bytes(1, name) && bytes(0, name) != bytes(2, name), "{name}");
        }
        let parts = ["train", "dev", "test"].map(|part| texts(made[0].path(), part));
        assert_eq!(parts.each_ref().map(Vec::len), [600, 40, 50]);
        let all = parts.concat();
        assert_eq!(all.iter().map(|(text, _)| text).collect::<HashSet<_>>().len(), 690, "none twice");
        for label in ["negative", "neutral", "positive"] {
            let count = all.iter().filter(|(_, found)| found == label).count();
            assert!((140..320).contains(&count), "{label}: {count}");
        }
        let options = ConllOptions { tag: 1, ..ConllOptions::default() };
        let tagged = read_conll(made[0].path().join("train.conll"), &options).unwrap();
        assert_eq!(tagged.len(), 600);
        let tags: HashSet<_> = tagged.into_iter().flat_map(|sentence| sentence.tags).collect();
        assert_eq!(tags.len(), 7, "{tags:?}");
    }

    #[test]
    fn other_files_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &SMALL).unwrap();
        write(folder.path(), &SMALL).unwrap();
        let error = write(folder.path(), &SynthTextOptions { seed: 5, ..SMALL }).unwrap_err().to_string();
        assert!(error.contains("was not overwritten"), "{error}");
        assert!(write(folder.path(), &SynthTextOptions { dev: 0, ..SMALL }).is_err());
    }
}
