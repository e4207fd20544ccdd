//! The beam of one sentence: which partial translations live on. Only decides; what words are likely is told.

use super::BeamOptions;

/// A translation.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Its words, without the mark of the end.
    pub tokens: Vec<i64>,
    /// The greater, the better: its logarithmic probability, divided by what [`BeamOptions::alpha`] says.
    pub score: f64,
}

/// A translation in the beam.
#[derive(Debug, Clone)]
struct Entry {
    tokens: Vec<i64>,
    /// Sum of the words' logarithmic probabilities.
    sum: f64,
    finished: bool,
}

/// The beam. Its entries are the rows of a sentence; where there are fewer, the rest of the rows repeat the first.
#[derive(Debug)]
pub(super) struct Beam {
    entries: Vec<Entry>,
    options: BeamOptions,
}

/// An entry may become this.
struct Candidate {
    parent: usize,
    /// None: the parent is finished and stays.
    word: Option<i64>,
    sum: f64,
    score: f64,
}

impl Beam {
    /// Nothing is said yet.
    pub(super) fn new(options: &BeamOptions) -> Self {
        let entries = vec![Entry { tokens: Vec::new(), sum: 0.0, finished: false }];
        Self { entries, options: *options }
    }

    /// The last word of each row.
    pub(super) fn last_words(&self) -> impl Iterator<Item = i64> {
        let last = |row: usize| {
            let entry = self.entries.get(row).unwrap_or(&self.entries[0]);
            entry.tokens.last().copied().unwrap_or(self.options.specials.bos)
        };
        (0..self.options.beam_size).map(last)
    }

    /// One more word for each translation that is not finished. `best` gives the likeliest words of a row, at least `beam_size` of them where there
    /// are as many, and their logarithmic probabilities. Gives the row that each row goes on from.
    pub(super) fn advance<B: IntoIterator<Item = (i64, f64)>>(
        &mut self,
        best: impl Fn(usize) -> B,
    ) -> Vec<usize> {
        let mut candidates = Vec::new();
        for (parent, entry) in self.entries.iter().enumerate() {
            let length = entry.tokens.len() as f64;
            if entry.finished {
                let score = self.penalised(entry.sum, length);
                candidates.push(Candidate { parent, word: None, sum: entry.sum, score });
                continue;
            }
            candidates.extend(best(parent).into_iter().map(|(word, score)| {
                let sum = entry.sum + score;
                Candidate { parent, word: Some(word), sum, score: self.penalised(sum, length + 1.0) }
            }));
        }
        candidates.retain(|candidate| candidate.sum > f64::NEG_INFINITY);
        candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
        candidates.truncate(self.options.beam_size);
        self.entries = candidates.iter().map(|candidate| self.child(candidate)).collect();
        let parent = |row: usize| candidates.get(row).or(candidates.first()).map_or(0, |c| c.parent);
        (0..self.options.beam_size).map(parent).collect()
    }

    fn child(&self, candidate: &Candidate) -> Entry {
        let parent = &self.entries[candidate.parent];
        match candidate.word {
            None => parent.clone(),
            Some(word) if word == self.options.specials.eos => {
                Entry { tokens: parent.tokens.clone(), sum: candidate.sum, finished: true }
            }
            Some(word) => {
                Entry { tokens: [&parent.tokens[..], &[word]].concat(), sum: candidate.sum, finished: false }
            }
        }
    }

    /// Whether all translations are finished.
    pub(super) fn is_done(&self) -> bool {
        self.entries.iter().all(|entry| entry.finished)
    }

    /// The best translations.
    pub(super) fn best(self, keep_n: usize) -> Vec<Hypothesis> {
        let mut all: Vec<_> = self
            .entries
            .iter()
            .map(|entry| {
                let length = entry.tokens.len() as f64;
                let score = match self.options.alpha > 0.0 {
                    true => self.penalised(entry.sum, length),
                    false => entry.sum / length,
                };
                Hypothesis { tokens: entry.tokens.clone(), score }
            })
            .collect();
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(keep_n);
        all
    }

    /// The score by which entries are compared during the search.
    fn penalised(&self, sum: f64, length: f64) -> f64 {
        match self.options.alpha > 0.0 {
            true => sum / ((5.0 + length) / 6.0).powf(self.options.alpha),
            false => sum,
        }
    }
}
