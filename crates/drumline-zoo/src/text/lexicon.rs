//! The words and labels of a run, by number: made of the training file by rank 0, and the same on all ranks.
//!
//! ```text
//!   begun anew   rank 0: train.csv ─▶ Lexicon ─▶ all ranks, through the group ─▶ OUT_DIR/vocab.json, labels.json, when training begins
//!   gone on      all: read these files ─▶ rank 0's checksum ─▶ whoever has others gets rank 0's through the group
//! ```

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use drumline::{Cause, ProcessGroup, ReduceOp, RunError, is_master, main_first};
use drumline_text::{Labels, TextError, Vocabulary, VocabularyOptions, WordCounts};
use serde::{Deserialize, Serialize};

use super::config::Text;
use super::texts::{Labelled, Texts};

const WORDS: &str = "vocab.json";
const LABELS: &str = "labels.json";

/// What the numbers mean that go into a net and come out of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lexicon {
    /// What goes in.
    pub words: Vocabulary,
    /// What comes out.
    pub labels: Labels,
}

impl Lexicon {
    /// The words and labels of these texts.
    pub fn of(texts: &Texts, keys: &Text) -> Self {
        let mut counts = WordCounts::default();
        for Labelled { words, .. } in &texts.samples {
            counts.add(words.iter().flatten());
        }
        let options = VocabularyOptions { max_n_words: keys.max_n_words, min_count: keys.min_count };
        let labels = texts.samples.iter().flat_map(|sample| &sample.labels);
        Self { words: Vocabulary::build(counts, &options), labels: Labels::of(labels) }
    }

    /// Reads what a run has left in its folder.
    pub fn read(folder: &Path) -> Result<Self, TextError> {
        let words = Vocabulary::read(folder.join(WORDS), None).map_err(|error| match error {
            TextError::NoVocabulary { path, source } => TextError::ReadFile { path, source },
            other => other,
        })?;
        Ok(Self { words, labels: Labels::read(folder.join(LABELS))? })
    }

    /// Leaves `vocab.json` and `labels.json` in a folder.
    pub fn write(&self, folder: &Path) -> Result<(), TextError> {
        std::fs::create_dir_all(folder)
            .map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
        self.words.write(folder.join(WORDS))?;
        self.labels.write(folder.join(LABELS))
    }

    /// Rank 0's, on all ranks: it makes one while the others wait. Nothing is written: who trains with it does that when training begins.
    ///
    /// ```
    /// use drumline::LocalGroup;
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
        let own = main_first(group, "building the vocabulary", || match is_master(group) {
            true => Ok(Some(make()?)),
            false => Ok(None),
        })?;
        Self::of_rank_0(group, own)
    }

    /// What a run has left in its folder, which rank 0 sees, on all ranks.
    #[track_caller]
    pub fn read_by_all(group: &ProcessGroup, folder: &Path) -> Result<Self, RunError> {
        let own = main_first(group, "reading the vocabulary", || match is_master(group) {
            true => {
                let untrained = |error| format!("{error}; try the OUT_DIR of a run that has trained");
                Ok(Some(Self::read(folder).map_err(untrained)?))
            }
            false => Ok(Self::read(folder).ok()),
        })?;
        Self::of_rank_0(group, own)
    }

    /// Rank 0 has one; the others perhaps the same.
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
    use drumline::LocalGroup;

    fn lexicon(word: &str) -> Lexicon {
        Lexicon { words: Vocabulary::of([(word.to_owned(), 3)]), labels: Labels::of(["a", "b"]) }
    }

    #[test]
    fn a_rank_with_another_file_under_the_name_gets_that_of_rank_0() {
        let folder = tempfile::tempdir().unwrap();
        let of = |rank: usize| folder.path().join(rank.to_string());
        lexicon("new").write(&of(0)).unwrap();
        lexicon("of another run").write(&of(1)).unwrap();
        std::fs::create_dir(of(2)).unwrap();
        std::fs::write(of(2).join(WORDS), "no vocabulary").unwrap();
        let got = LocalGroup::run(4, |group| Ok(Lexicon::read_by_all(&group, &of(group.rank())).unwrap()));
        assert_eq!(got.unwrap(), vec![lexicon("new"); 4]);
    }

    #[test]
    fn what_rank_0_cannot_make_is_told_on_all_ranks() {
        let said = LocalGroup::run(2, |group| {
            let made = Lexicon::shared(&group, || Err("no such file".into()));
            Ok(made.unwrap_err().to_string())
        });
        assert_eq!(said.unwrap(), ["rank 0: building the vocabulary: no such file"; 2]);
    }
}
