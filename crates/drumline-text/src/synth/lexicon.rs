//! The words of the two languages. They are made of random syllables, and no word occurs twice in a language.

use crate::random::Random;
use std::collections::HashSet;

pub(super) const NOUNS: usize = 24;
pub(super) const ADJECTIVES: usize = 12;
pub(super) const VERBS: usize = 12;
pub(super) const ADVERBS: usize = 6;
pub(super) const ARTICLES: usize = 2;

/// The words of both languages. Words at the same index of the two lists have the same meaning.
pub(super) struct Lexicon {
    pub(super) source: Words,
    pub(super) target: Words,
    /// The genders of the target's nouns.
    pub(super) genders: Vec<Gender>,
}

/// The gender of a noun of the target language. The source language has none.
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
    /// The first word of a question; only the target uses it.
    pub(super) question: String,
}

/// The sounds of a language. A syllable is an onset and a vowel.
struct Sounds {
    onsets: &'static [&'static str],
    vowels: &'static [&'static str],
}

// The two languages have no onset in common, so they do not look alike.
const SOURCE_SOUNDS: Sounds = Sounds {
    onsets: &["b", "d", "f", "g", "l", "m", "n", "p", "r", "t", "st", "gr"],
    vowels: &["a", "e", "i", "o", "oo", "ee"],
};
const TARGET_SOUNDS: Sounds = Sounds {
    onsets: &["k", "z", "v", "ch", "h", "y", "sh", "j", "kr", "q", "x", "w"],
    vowels: &["a", "u", "i", "á", "ö", "ia"],
};

impl Lexicon {
    pub(super) fn draw(random: &mut Random) -> Self {
        let source = Words::draw(&SOURCE_SOUNDS, random);
        let target = Words::draw(&TARGET_SOUNDS, random);
        let gender = |_| if random.chance(0.5) { Gender::First } else { Gender::Second };
        let genders = (0..NOUNS).map(gender).collect();
        Self { source, target, genders }
    }
}

impl Words {
    fn draw(sounds: &Sounds, random: &mut Random) -> Self {
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

/// A random word that is not in `taken`, and adds it there.
fn stem(sounds: &Sounds, syllables: usize, taken: &mut HashSet<String>, random: &mut Random) -> String {
    loop {
        let syllable = |_| format!("{}{}", random.choose(sounds.onsets), random.choose(sounds.vowels));
        let word: String = (0..syllables).map(syllable).collect();
        if taken.insert(word.clone()) {
            return word;
        }
    }
}
