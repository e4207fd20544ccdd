//! A translation task made by rule: something to learn from where no corpus can be fetched.
//!
//! Two invented languages, of which one is translated into the other:
//!
//! ```text
//!   source   the  old  green  houses  not  see-PAST  a  tree  slowly  ?       like English: adjectives first, verb in the middle
//!   target   Q  the-F.PL  houses-PL  green-F.PL  old-F.PL  a-M  tree  slowly  not  see-PAST.PL  .
//! ```
//! Word for word it cannot be done: adjectives follow their noun in reverse, the verb goes to the end, articles and adjectives take
//! their noun's gender and number, the verb its subject's number, and a question begins with a word of its own. Each word is
//! one token; no sentence of a part occurs in another.

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

/// How many sentences of each part, and which languages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthOptions {
    /// Pairs to train on.
    pub train: usize,
    /// Pairs to choose a model by.
    pub valid: usize,
    /// Pairs to judge it by.
    pub test: usize,
    /// Decides the words and the sentences.
    pub seed: u64,
}

impl Default for SynthOptions {
    fn default() -> Self {
        Self { train: 20_000, valid: 500, test: 500, seed: 1234 }
    }
}

/// Streams of random numbers.
const WORDS: u64 = 0;
const SENTENCES: u64 = 1;

/// Write `train`, `valid` and `test`, each as `.src` and `.tgt`, and the vocabularies `vocab.src.json` and `vocab.tgt.json`.
///
/// The same options give the same bytes. A file that is there with other content is left as it is, and is an error.
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
    let (folder, SynthOptions { train, valid, test, seed }) = (folder.as_ref(), options.clone());
    if [train, valid, test].contains(&0) {
        let what = format!("{train}, {valid} and {test} pairs asked for; try at least 1 of each");
        return Err(TextError::Synth { what });
    }
    fs::create_dir_all(folder).map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
    let lexicon = Lexicon::draw(&mut Random::new(seed, WORDS));
    let mut sentences = Sentences { lexicon, random: Random::new(seed, SENTENCES), seen: HashSet::new() };
    // The small parts first, so that they stay the same whatever the size of the large one.
    let parts = [("test", test), ("valid", valid), ("train", train)];
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
    /// Sources so far. There are more than 10^10, so another one is soon found.
    seen: HashSet<String>,
}

impl Sentences {
    /// The lines of both files.
    fn draw(&mut self, pairs: usize) -> (String, String) {
        let (mut source, mut target) = (String::new(), String::new());
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
    fn parts_are_apart_and_follow_from_the_seed() {
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
    fn other_files_are_left_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &SMALL).unwrap();
        write(folder.path(), &SMALL).unwrap();
        let error = write(folder.path(), &SynthOptions { seed: 5, ..SMALL }).unwrap_err().to_string();
        assert!(error.contains("left as it is"), "{error}");
        assert!(write(folder.path(), &SynthOptions { valid: 0, ..SMALL }).is_err());
    }
}
