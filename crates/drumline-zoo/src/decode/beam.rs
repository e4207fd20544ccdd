//! The beam of one sentence: decides which partial translations continue, given the probabilities of the next tokens.

use super::BeamOptions;

/// A translation.
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Its tokens, without the end token.
    pub tokens: Vec<i64>,
    /// The log probability, divided by the length penalty of [`BeamOptions::alpha`]. Greater is better.
    pub score: f64,
}

/// A partial translation in the beam.
#[derive(Debug, Clone)]
struct Entry {
    tokens: Vec<i64>,
    /// The sum of the tokens' log probabilities.
    sum: f64,
    finished: bool,
}

/// The beam. Its entries are the rows of a sentence; if there are fewer entries than rows, the remaining rows repeat
/// the first.
#[derive(Debug)]
pub(super) struct Beam {
    entries: Vec<Entry>,
    options: BeamOptions,
}

/// A possible successor of an entry.
struct Candidate {
    parent: usize,
    /// The next token; `None` if the parent is finished and stays in the beam.
    word: Option<i64>,
    sum: f64,
    score: f64,
}

impl Beam {
    /// Starts with one empty translation.
    pub(super) fn new(options: &BeamOptions) -> Self {
        let entries = vec![Entry { tokens: Vec::new(), sum: 0.0, finished: false }];
        Self { entries, options: *options }
    }

    /// The last token of each row.
    pub(super) fn last_words(&self) -> impl Iterator<Item = i64> {
        let last = |row: usize| {
            let entry = self.entries.get(row).unwrap_or(&self.entries[0]);
            entry.tokens.last().copied().unwrap_or(self.options.specials.bos)
        };
        (0..self.options.beam_size).map(last)
    }

    /// Adds one token to each translation that is not finished. `best` returns the most probable tokens of a row with
    /// their log probabilities: at least `beam_size` of them, if there are that many. Returns the row that each new row
    /// continues.
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
                let score = if self.options.alpha > 0.0 {
                    self.penalised(entry.sum, length)
                } else {
                    entry.sum / length
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
        if self.options.alpha > 0.0 { sum / ((5.0 + length) / 6.0).powf(self.options.alpha) } else { sum }
    }
}
