//! Counts the n-grams of a hypothesis, and how many of them are correct.

use super::ORDER;
use std::collections::HashMap;

/// An n-gram as the numbers of its words, filled up with [`NONE`], which is cheap to compare.
type Ngram = [u32; ORDER];

const NONE: u32 = u32::MAX;

/// The n-grams of one hypothesis.
pub(super) struct Ngrams<'a> {
    numbers: HashMap<&'a str, u32>,
    counts: HashMap<Ngram, u64>,
}

impl<'a> Ngrams<'a> {
    pub(super) fn of(hypothesis: &'a [String]) -> Self {
        let mut numbers = HashMap::new();
        for word in hypothesis {
            let next = numbers.len() as u32;
            numbers.entry(word.as_str()).or_insert(next);
        }
        let counts = count(hypothesis, &numbers);
        Self { numbers, counts }
    }

    /// The number of all n-grams and of the correct ones, for each n.
    pub(super) fn count(&self, references: &[Vec<String>]) -> Counts {
        let mut most: HashMap<Ngram, u64> = HashMap::new();
        for reference in references {
            for (ngram, times) in count(reference, &self.numbers) {
                let known = most.entry(ngram).or_default();
                *known = times.max(*known);
            }
        }
        let mut counts = Counts::default();
        for (ngram, times) in &self.counts {
            let length = ngram.iter().take_while(|word| **word != NONE).count();
            counts.total[length - 1] += times;
            counts.correct[length - 1] += most.get(ngram).map_or(0, |most| *times.min(most));
        }
        counts
    }
}

/// Numbers of n-grams, for each n.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) total: [u64; ORDER],
    pub(super) correct: [u64; ORDER],
}

/// How often each n-gram occurs. Words without a number are not in the hypothesis, so n-grams with them are skipped.
fn count(words: &[String], numbers: &HashMap<&str, u32>) -> HashMap<Ngram, u64> {
    let numbers: Vec<_> = words.iter().map(|word| numbers.get(word.as_str()).copied()).collect();
    let mut counts = HashMap::new();
    for start in 0..numbers.len() {
        let mut ngram = [NONE; ORDER];
        for (place, number) in numbers[start..].iter().take(ORDER).enumerate() {
            let Some(number) = number else { break };
            ngram[place] = *number;
            *counts.entry(ngram).or_default() += 1;
        }
    }
    counts
}
