//! How often each n-gram occurs, and how many of a hypothesis' are correct.

use super::ORDER;
use std::collections::HashMap;

/// Words as numbers, those behind the n-gram's end as [`NONE`]: cheap to compare.
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

    /// All n-grams, and the correct ones, by their length.
    pub(super) fn count(&self, references: &[Vec<String>]) -> ([u64; ORDER], [u64; ORDER]) {
        let mut most: HashMap<Ngram, u64> = HashMap::new();
        for reference in references {
            for (ngram, times) in count(reference, &self.numbers) {
                let known = most.entry(ngram).or_default();
                *known = times.max(*known);
            }
        }
        let (mut total, mut correct) = ([0; ORDER], [0; ORDER]);
        for (ngram, times) in &self.counts {
            let length = ngram.iter().take_while(|word| **word != NONE).count();
            total[length - 1] += times;
            correct[length - 1] += most.get(ngram).map_or(0, |most| *times.min(most));
        }
        (total, correct)
    }
}

/// Words without a number occur in no hypothesis, so n-grams with them are of no interest.
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
