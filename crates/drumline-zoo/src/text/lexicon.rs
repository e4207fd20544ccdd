//! The vocabulary and labels of a run. Rank 0 builds them from the training file and shares them with all ranks.
//!
//! ```text
//!   new run    rank 0: train.csv ─▶ Lexicon ─▶ broadcast ─▶ when training begins: OUT_DIR/vocab.json, labels.json
//!   resumed    all ranks: read these files ─▶ compare with rank 0's checksum ─▶ ranks that differ receive rank 0's
//! ```

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use drumline::comm::RunError;
use drumline::data::Cause;
use drumline::{ProcessGroup, ReduceOp, is_master, main_first};
use drumline_text::{Labels, TextError, Vocabulary, VocabularyOptions, WordCounts};
use serde::{Deserialize, Serialize};

use super::config::Text;
use super::texts::{Labelled, Texts};

const WORDS: &str = "vocab.json";
const LABELS: &str = "labels.json";

/// The vocabulary of a network's input and the labels of its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lexicon {
    /// The input words.
    pub words: Vocabulary,
    /// The output labels.
    pub labels: Labels,
}

impl Lexicon {
    /// Collects the words and labels of texts.
    pub fn of(texts: &Texts, keys: &Text) -> Self {
        let mut counts = WordCounts::default();
        for Labelled { words, .. } in &texts.samples {
            counts.add(words.iter().flatten());
        }
        let options = VocabularyOptions { max_n_words: keys.max_n_words, min_count: keys.min_count };
        let labels = texts.samples.iter().flat_map(|sample| &sample.labels);
        Self { words: Vocabulary::build(counts, &options), labels: Labels::of(labels) }
    }

    /// Reads the lexicon that a run has written to its folder.
    pub fn read(folder: &Path) -> Result<Self, TextError> {
        let unlabelled = Self::read_words(folder)?;
        Ok(Self { labels: Labels::read(folder.join(LABELS))?, ..unlabelled })
    }

    /// Reads the lexicon of a run that has no labels.
    pub fn read_words(folder: &Path) -> Result<Self, TextError> {
        let words = Vocabulary::read(folder.join(WORDS), None).map_err(|error| match error {
            TextError::NoVocabulary { path, source } => TextError::ReadFile { path, source },
            other => other,
        })?;
        Ok(Self { words, labels: Labels::of::<String>([]) })
    }

    /// Writes `vocab.json`, and `labels.json` if there are labels, to a folder.
    pub fn write(&self, folder: &Path) -> Result<(), TextError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
        self.words.write(folder.join(WORDS))?;
        if self.labels.is_empty() { Ok(()) } else { self.labels.write(folder.join(LABELS)) }
    }

    /// Builds the lexicon on rank 0 while the other ranks wait, and returns it on all ranks. It writes no file; a
    /// training run writes the lexicon when training begins.
    ///
    /// ```
    /// use drumline::comm::LocalGroup;
    /// use drumline_text::{Labels, Vocabulary};
    /// use drumline_zoo::text::Lexicon;
    ///
    /// let made = LocalGroup::run(3, |group| {
    ///     let make = || Ok(Lexicon { words: Vocabulary::of([]), labels: Labels::of(["neg", "pos"]) });
    ///     Ok(Lexicon::shared(&group, make).expect("nothing fails"))
    /// })?;
    /// assert!(made.iter().all(|lexicon| lexicon.labels.len() == 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn shared(
        group: &ProcessGroup,
        make: impl FnOnce() -> Result<Self, Cause>,
    ) -> Result<Self, RunError> {
        let own = main_first(group, "building the vocabulary", || {
            if is_master(group) { Ok(Some(make()?)) } else { Ok(None) }
        })?;
        Self::of_rank_0(group, own)
    }

    /// Reads the lexicon in the run's folder that rank 0 sees, and returns it on all ranks. `read` is
    /// [`read`](Self::read) or [`read_words`](Self::read_words).
    #[track_caller]
    pub fn read_by_all(
        group: &ProcessGroup,
        read: impl FnOnce() -> Result<Self, TextError>,
    ) -> Result<Self, RunError> {
        let own = main_first(group, "reading the vocabulary", || {
            if !is_master(group) {
                return Ok(read().ok());
            }
            let untrained = |error| format!("{error}; try the OUT_DIR of a run that has trained");
            Ok(Some(read().map_err(untrained)?))
        })?;
        Self::of_rank_0(group, own)
    }

    /// Returns rank 0's lexicon on all ranks. It is sent only if some rank has another one.
    #[track_caller]
    fn of_rank_0(group: &ProcessGroup, own: Option<Self>) -> Result<Self, RunError> {
        let mut checksum = [own.as_ref().map_or(0, Self::checksum)];
        group.broadcast(&mut checksum, 0)?;
        let own = own.filter(|own| own.checksum() == checksum[0]);
        let mut lacking = [u8::from(own.is_none())];
        group.all_reduce(&mut lacking, ReduceOp::Max)?;
        match own {
            Some(own) if lacking[0] == 0 => Ok(own),
            own => Ok(group.broadcast_object(own.as_ref(), 0)?),
        }
    }

    fn checksum(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for id in 0..self.words.len() as u32 {
            (self.words.word(id), self.words.count(id)).hash(&mut hasher);
        }
        self.labels.names().hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline::comm::LocalGroup;

    fn lexicon(word: &str) -> Lexicon {
        Lexicon { words: Vocabulary::of([(word.to_owned(), 3)]), labels: Labels::of(["a", "b"]) }
    }

    #[test]
    fn a_rank_with_another_lexicon_gets_that_of_rank_0() {
        let folder = tempfile::tempdir().unwrap();
        let of = |rank: usize| folder.path().join(rank.to_string());
        lexicon("new").write(&of(0)).unwrap();
        lexicon("of another run").write(&of(1)).unwrap();
        std::fs::create_dir(of(2)).unwrap();
        std::fs::write(of(2).join(WORDS), "no vocabulary").unwrap();
        let got = LocalGroup::run(4, |group| {
            Ok(Lexicon::read_by_all(&group, || Lexicon::read(&of(group.rank()))).unwrap())
        });
        assert_eq!(got.unwrap(), vec![lexicon("new"); 4]);
    }

    #[test]
    fn an_error_of_rank_0_is_returned_on_all_ranks() {
        let said = LocalGroup::run(2, |group| {
            let made = Lexicon::shared(&group, || Err("no such file".into()));
            Ok(made.unwrap_err().to_string())
        });
        assert_eq!(said.unwrap(), ["rank 0: building the vocabulary: no such file"; 2]);
    }
}
