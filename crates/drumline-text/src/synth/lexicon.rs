//! The words of the two languages: made of syllables, none twice.

use crate::random::Random;
use std::collections::HashSet;

pub(super) const NOUNS: usize = 24;
pub(super) const ADJECTIVES: usize = 12;
pub(super) const VERBS: usize = 12;
pub(super) const ADVERBS: usize = 6;
pub(super) const ARTICLES: usize = 2;

/// Two languages, word by word. What stands in one list at some place means what stands in the other there.
pub(super) struct Lexicon {
    pub(super) source: Words,
    pub(super) target: Words,
    /// Of the target's nouns.
    pub(super) genders: Vec<Gender>,
}

/// The target's nouns have one; the source does not show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gender {
    First,
    Second,
}

/// The stems of a language.
pub(super) struct Words {
    pub(super) nouns: Vec<String>,
    pub(super) adjectives: Vec<String>,
    pub(super) verbs: Vec<String>,
    pub(super) adverbs: Vec<String>,
    pub(super) articles: Vec<String>,
    pub(super) not: String,
    pub(super) and: String,
    /// Begins a question, in the target.
    pub(super) question: String,
}

/// What syllables are made of: the two languages do not look alike.
const SOURCE_SOUNDS: (&[&str], &[&str]) =
    (&["b", "d", "f", "g", "l", "m", "n", "p", "r", "t", "st", "gr"], &["a", "e", "i", "o", "oo", "ee"]);
const TARGET_SOUNDS: (&[&str], &[&str]) =
    (&["k", "z", "v", "ch", "h", "y", "sh", "j", "kr", "q", "x", "w"], &["a", "u", "i", "á", "ö", "ia"]);

impl Lexicon {
    pub(super) fn draw(random: &mut Random) -> Self {
        let source = Words::draw(SOURCE_SOUNDS, random);
        let target = Words::draw(TARGET_SOUNDS, random);
        let gender = |_| if random.chance(0.5) { Gender::First } else { Gender::Second };
        let genders = (0..NOUNS).map(gender).collect();
        Self { source, target, genders }
    }
}

impl Words {
    fn draw(sounds: (&[&str], &[&str]), random: &mut Random) -> Self {
        let mut taken = HashSet::new();
        let mut stems = |syllables: usize, count: usize| -> Vec<String> {
            (0..count).map(|_| stem(sounds, syllables, &mut taken, random)).collect()
        };
        Self {
            nouns: stems(2, NOUNS),
            adjectives: stems(2, ADJECTIVES),
            verbs: stems(2, VERBS),
            adverbs: stems(3, ADVERBS),
            articles: stems(1, ARTICLES),
            not: stems(1, 1).concat(),
            and: stems(1, 1).concat(),
            question: stems(1, 1).concat(),
        }
    }
}

/// A word that is not there yet.
fn stem(
    (onsets, vowels): (&[&str], &[&str]),
    syllables: usize,
    taken: &mut HashSet<String>,
    random: &mut Random,
) -> String {
    loop {
        let syllable = |_| format!("{}{}", random.choose(onsets), random.choose(vowels));
        let word: String = (0..syllables).map(syllable).collect();
        if taken.insert(word.clone()) {
            return word;
        }
    }
}
