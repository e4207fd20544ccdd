//! A synthetic translation task, for use where no corpus can be downloaded.
//!
//! It has two invented languages. The task is to translate one into the other:
//!
//! ```text
//!   source   the  old  green  houses  not  see-PAST  a  tree  slowly  ?       like English: adjectives first, verb in the middle
//!   target   Q  the-F.PL  houses-PL  green-F.PL  old-F.PL  a-M  tree  slowly  not  see-PAST.PL  .
//! ```
//! It cannot be translated word by word. In the target, adjectives follow their noun in reverse order, and the verb is at the
//! end. Articles and adjectives agree with their noun in gender and number, the verb with its subject in number. A question begins
//! with a question word. Each word is one token. No sentence is in two of the parts train, valid and test.

mod clause;
mod lexicon;

use crate::beside::write_once;
use crate::random::Random;
use crate::{TextError, Vocabulary, VocabularyOptions, WordCounts};
use clause::Sentence;
use lexicon::Lexicon;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// The sizes of the parts, and the seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthOptions {
    /// The number of pairs for training.
    pub train: usize,
    /// The number of pairs for validation.
    pub valid: usize,
    /// The number of pairs for the test.
    pub test: usize,
    /// The seed of the words and the sentences.
    pub seed: u64,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self { train: 20_000, valid: 500, test: 500, seed: 1234 }
    }
}

// The streams of random numbers.
const WORDS: u64 = 0;
const SENTENCES: u64 = 1;

/// Writes `train`, `valid` and `test`, each as `.src` and `.tgt`, and the vocabularies `vocab.src.json` and `vocab.tgt.json`.
///
/// The same options give the same bytes. It is an error if a file exists with different content; it is not overwritten.
///
/// ```
/// use drumline_text::synth::{self, SynthOptions};
/// use drumline_text::{CorpusOptions, ParallelCorpus, Vocabulary};
///
/// let folder = tempfile::tempdir()?;
/// synth::write(folder.path(), &SynthOptions { train: 200, ..SynthOptions::default() })?;
/// let [source, target] = ["train.src", "train.tgt"].map(|name| folder.path().join(name));
/// assert_eq!(ParallelCorpus::open(source, target, &CorpusOptions::default())?.len(), 200);
/// assert!(Vocabulary::read(folder.path().join("vocab.tgt.json"), None)?.len() > 50);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(folder: impl AsRef<Path>, options: &SynthOptions) -> Result<(), TextError> {
    let folder = folder.as_ref();
    let SynthOptions { train, valid, test, seed } = *options;
    // The small parts come first, so that they do not depend on the size of the large one.
    let parts = [("test", test), ("valid", valid), ("train", train)];
    TextError::if_empty(parts, "pairs")?;
    fs::create_dir_all(folder).map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
    let lexicon = Lexicon::draw(&mut Random::new(seed, WORDS));
    let mut sentences = Sentences { lexicon, random: Random::new(seed, SENTENCES), seen: HashSet::new() };
    let parts = parts.map(|(name, pairs)| (name, sentences.draw(pairs)));
    for (name, (source, target)) in &parts {
        write_once(&folder.join(format!("{name}.src")), source.as_bytes())?;
        write_once(&folder.join(format!("{name}.tgt")), target.as_bytes())?;
    }
    let [.., (_, (source, target))] = &parts;
    write_vocabulary(&folder.join("vocab.src.json"), source)?;
    write_vocabulary(&folder.join("vocab.tgt.json"), target)
}

struct Sentences {
    lexicon: Lexicon,
    random: Random,
    /// The source sentences so far. More than 10^10 are possible, so a new one is found quickly.
    seen: HashSet<String>,
}

impl Sentences {
    /// The text of the source file and of the target file.
    fn draw(&mut self, pairs: usize) -> (String, String) {
        let mut source = String::new();
        let mut target = String::new();
        for _ in 0..pairs {
            let sentence = self.next();
            let words = sentence.source(&self.lexicon).join(" ");
            source += &format!("{words}\n");
            target += &format!("{}\n", sentence.target(&self.lexicon).join(" "));
            self.seen.insert(words);
        }
        (source, target)
    }

    fn next(&mut self) -> Sentence {
        loop {
            let sentence = Sentence::draw(&mut self.random);
            if !self.seen.contains(&sentence.source(&self.lexicon).join(" ")) {
                return sentence;
            }
        }
    }
}

fn write_vocabulary(path: &Path, text: &str) -> Result<(), TextError> {
    let mut counts = WordCounts::default();
    counts.add(text.split_whitespace());
    write_once(path, Vocabulary::build(counts, &VocabularyOptions::default()).to_json().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: SynthOptions = SynthOptions { train: 400, valid: 30, test: 40, seed: 1 };

    fn read(folder: &Path, name: &str) -> String {
        fs::read_to_string(folder.join(name)).unwrap()
    }

    #[test]
    fn parts_share_no_sentence_and_depend_on_the_seed() {
        let folders = [SMALL, SMALL, SynthOptions { seed: 2, ..SMALL }, SynthOptions { train: 500, ..SMALL }]
            .map(|options| {
                let folder = tempfile::tempdir().unwrap();
                write(folder.path(), &options).unwrap();
                folder
            });
        let names = ["train.src", "train.tgt", "test.src", "vocab.tgt.json"];
        let [first, again, other, more] =
            folders.each_ref().map(|folder| names.map(|name| read(folder.path(), name)));
        assert_eq!(first, again);
        assert!(first.iter().zip(&other).all(|(a, b)| a != b));
        assert!(more[0].starts_with(&first[0]) && more[2] == first[2]);
        let lines = |name| read(folders[0].path(), name).lines().map(str::to_owned).collect::<Vec<_>>();
        let parts = ["train.src", "valid.src", "test.src"].map(lines);
        assert_eq!(parts.each_ref().map(Vec::len), [400, 30, 40]);
        assert_eq!(parts.concat().into_iter().collect::<HashSet<_>>().len(), 470, "none twice");
    }

    #[test]
    fn other_files_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &SMALL).unwrap();
        write(folder.path(), &SMALL).unwrap();
        let error = write(folder.path(), &SynthOptions { seed: 5, ..SMALL }).unwrap_err().to_string();
        assert!(error.contains("was not overwritten"), "{error}");
        let error = write(folder.path(), &SynthOptions { valid: 0, ..SMALL }).unwrap_err().to_string();
        assert_eq!(error, "cannot generate data of which valid has no pairs; try at least 1");
    }
}
