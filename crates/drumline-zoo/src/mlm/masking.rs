//! Selects the words to predict, and replaces them.

use drumline::data::SampleRng;
use drumline_text::Vocabulary;

/// The first id of a word. Smaller ids are special tokens, which are neither masked nor drawn.
const FIRST_WORD: i64 = Vocabulary::UNK as i64 + 1;

/// BERT's masking: of the chosen words, 80 % become the mask token, 10 % a random word, and 10 % stay unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Masking {
    /// The fraction of a text's words that is chosen.
    pub probability: f64,
    /// The id of the mask token, which follows the vocabulary.
    pub mask: i64,
}

/// A word to predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// Its position in the text.
    pub place: usize,
    /// Its original id.
    pub word: i64,
}

impl Masking {
    /// Whether an id is a word that can be chosen. Special tokens and unknown words cannot.
    pub fn is_word(id: i64) -> bool {
        id >= FIRST_WORD
    }

    /// Masks a text in place and returns the chosen words in order. Their number is `probability` of all words, rounded
    /// up or down at random, and at least one.
    pub fn apply(&self, tokens: &mut [i64], rng: &mut SampleRng) -> Vec<Chosen> {
        let mut places: Vec<_> = (0..tokens.len()).filter(|place| Self::is_word(tokens[*place])).collect();
        let count = (self.probability * places.len() as f64 + rng.uniform()) as usize;
        let count = count.max(1).min(places.len());
        for place in 0..count {
            let other = place + rng.below(places.len() - place);
            places.swap(place, other);
        }
        places.truncate(count);
        places.sort_unstable();
        let masked = |place| {
            let word = tokens[place];
            tokens[place] = self.shown(word, rng);
            Chosen { place, word }
        };
        places.into_iter().map(masked).collect()
    }

    fn shown(&self, word: i64, rng: &mut SampleRng) -> i64 {
        match rng.uniform() {
            part if part < 0.8 => self.mask,
            part if part < 0.9 => FIRST_WORD + rng.below((self.mask - FIRST_WORD) as usize) as i64,
            _ => word,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline::data::Sample;

    const MASKING: Masking = Masking { probability: 0.15, mask: 104 };

    #[test]
    fn fifteen_percent_are_chosen_and_most_of_them_masked() {
        let text: Vec<i64> =
            (0..100).map(|place| if place % 10 == 0 { place / 10 % 4 } else { 4 + place }).collect();
        let [mut masked, mut drawn, mut kept] = [0, 0, 0];
        let mut counts = [0; 100];
        for index in 0..2000 {
            let mut tokens = text.clone();
            let chosen = MASKING.apply(&mut tokens, &mut Sample::new(7, 0, index).rng());
            assert!(chosen.is_sorted_by_key(|chosen| chosen.place) && (13..=14).contains(&chosen.len()));
            for Chosen { place, word } in &chosen {
                assert!(Masking::is_word(*word) && text[*place] == *word);
                counts[*place] += 1;
                match tokens[*place] {
                    104 => masked += 1,
                    other if other == *word => kept += 1,
                    other => {
                        assert!((4..104).contains(&other));
                        drawn += 1;
                    }
                }
            }
            let others = (0..100).filter(|place| chosen.iter().all(|chosen| chosen.place != *place));
            assert!(others.into_iter().all(|place| tokens[place] == text[place]), "the rest stays");
        }
        let all = f64::from(masked + drawn + kept);
        assert!((all / (2000.0 * 90.0) - 0.15).abs() < 1e-3, "{all}");
        for (count, part) in [(masked, 0.8), (drawn, 0.099), (kept, 0.101)] {
            assert!((f64::from(count) / all - part).abs() < 6e-3, "{count} of {all} is not {part}");
        }
        for (place, count) in counts.iter().enumerate() {
            let expected = if place % 10 == 0 { 0..=0 } else { 220..=380 };
            assert!(expected.contains(count), "place {place}: {count}");
        }
    }

    #[test]
    fn short_texts_have_one_masked_word_and_special_tokens_none() {
        for index in 0..100 {
            let mut tokens = [2, 3, 50, 1];
            let chosen = MASKING.apply(&mut tokens, &mut Sample::new(0, 0, index).rng());
            assert_eq!(chosen, [Chosen { place: 2, word: 50 }]);
            assert_eq!([tokens[0], tokens[1], tokens[3]], [2, 3, 1]);
            assert_eq!(MASKING.apply(&mut [2, 3, 1, 0], &mut Sample::new(0, 0, index).rng()), []);
        }
    }
}
