//! The meaning of a sentence, and its words in each language.

use super::lexicon::{ADJECTIVES, ADVERBS, ARTICLES, Gender, Lexicon, NOUNS, VERBS};
use crate::random::Random;

/// One clause, or two joined by "and".
pub(super) struct Sentence {
    clauses: Vec<Clause>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Statement,
    Question,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Number {
    One,
    Many,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tense {
    Present,
    Past,
}

/// A subject, a verb, an object and perhaps an adverb.
struct Clause {
    subject: NounPhrase,
    verb: usize,
    tense: Tense,
    denied: bool,
    object: NounPhrase,
    adverb: Option<usize>,
}

struct NounPhrase {
    article: usize,
    adjectives: Vec<usize>,
    noun: usize,
    number: Number,
}

impl Sentence {
    pub(super) fn draw(random: &mut Random) -> Self {
        let num_clauses = if random.chance(0.2) { 2 } else { 1 };
        let clauses = (0..num_clauses).map(|_| Clause::draw(random)).collect();
        let kind = if random.chance(0.2) { Kind::Question } else { Kind::Statement };
        Self { clauses, kind }
    }

    pub(super) fn source(&self, lexicon: &Lexicon) -> Vec<String> {
        let clauses: Vec<_> = self.clauses.iter().map(|clause| clause.source(lexicon)).collect();
        let mut words = clauses.join(&lexicon.source.and);
        words.push(if self.kind == Kind::Question { "?" } else { "." }.to_owned());
        words
    }

    pub(super) fn target(&self, lexicon: &Lexicon) -> Vec<String> {
        let clauses: Vec<_> = self.clauses.iter().map(|clause| clause.target(lexicon)).collect();
        let mut words = clauses.join(&lexicon.target.and);
        if self.kind == Kind::Question {
            words.insert(0, lexicon.target.question.clone());
        }
        words.push(".".to_owned());
        words
    }
}

impl Clause {
    fn draw(random: &mut Random) -> Self {
        Self {
            subject: NounPhrase::draw(random),
            verb: random.below(VERBS),
            tense: if random.chance(0.5) { Tense::Present } else { Tense::Past },
            denied: random.chance(0.25),
            object: NounPhrase::draw(random),
            adverb: random.chance(0.4).then(|| random.below(ADVERBS)),
        }
    }

    /// Subject, "not", verb, object, adverb.
    fn source(&self, lexicon: &Lexicon) -> Vec<String> {
        let words = &lexicon.source;
        let past = if self.tense == Tense::Past { "ed" } else { "" };
        let mut said = self.subject.source(lexicon);
        said.extend(self.denied.then(|| words.not.clone()));
        said.push(format!("{}{past}", words.verbs[self.verb]));
        said.extend(self.object.source(lexicon));
        said.extend(self.adverb.map(|adverb| words.adverbs[adverb].clone()));
        said
    }

    /// Subject, object, adverb, "not", verb; the verb shows the subject's number.
    fn target(&self, lexicon: &Lexicon) -> Vec<String> {
        let words = &lexicon.target;
        let past = if self.tense == Tense::Past { "l" } else { "" };
        let number = if self.subject.number == Number::Many { "em" } else { "o" };
        let mut said = self.subject.target(lexicon);
        said.extend(self.object.target(lexicon));
        said.extend(self.adverb.map(|adverb| words.adverbs[adverb].clone()));
        said.extend(self.denied.then(|| words.not.clone()));
        said.push(format!("{}{past}{number}", words.verbs[self.verb]));
        said
    }
}

impl NounPhrase {
    fn draw(random: &mut Random) -> Self {
        let num_adjectives = [0, 0, 1, 1, 2][random.below(5)];
        Self {
            article: random.below(ARTICLES),
            adjectives: (0..num_adjectives).map(|_| random.below(ADJECTIVES)).collect(),
            noun: random.below(NOUNS),
            number: if random.chance(0.5) { Number::One } else { Number::Many },
        }
    }

    /// Article, adjectives, noun; only the noun shows the number.
    fn source(&self, lexicon: &Lexicon) -> Vec<String> {
        let words = &lexicon.source;
        let many = if self.number == Number::Many { "s" } else { "" };
        let mut said = vec![words.articles[self.article].clone()];
        said.extend(self.adjectives.iter().map(|adjective| words.adjectives[*adjective].clone()));
        said.push(format!("{}{many}", words.nouns[self.noun]));
        said
    }

    /// Article, noun, adjectives from the last to the first; all show the number, and all but the noun show its gender.
    fn target(&self, lexicon: &Lexicon) -> Vec<String> {
        let words = &lexicon.target;
        let ending = match (lexicon.genders[self.noun], self.number) {
            (Gender::First, Number::One) => "e",
            (Gender::First, Number::Many) => "en",
            (Gender::Second, Number::One) => "or",
            (Gender::Second, Number::Many) => "orn",
        };
        let many = if self.number == Number::Many { "t" } else { "" };
        let mut said = vec![format!("{}{ending}", words.articles[self.article])];
        said.push(format!("{}{many}", words.nouns[self.noun]));
        let adjectives = self.adjectives.iter().rev();
        said.extend(adjectives.map(|adjective| format!("{}{ending}", words.adjectives[*adjective])));
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_language_has_its_order_and_agreement() {
        let mut lexicon = Lexicon::draw(&mut Random::new(1, 0));
        let name = |list: &mut Vec<String>, letter: &str| {
            (0..).zip(list).for_each(|(number, word)| *word = format!("{letter}{number}_"));
        };
        for words in [&mut lexicon.source, &mut lexicon.target] {
            name(&mut words.nouns, "n");
            name(&mut words.adjectives, "j");
            name(&mut words.verbs, "v");
            name(&mut words.adverbs, "w");
            name(&mut words.articles, "a");
            (words.not, words.and, words.question) = ("not".into(), "and".into(), "what".into());
        }
        lexicon.genders[..2].copy_from_slice(&[Gender::First, Gender::Second]);
        let phrase = |noun, number, adjectives: &[usize]| NounPhrase {
            article: noun,
            adjectives: adjectives.to_vec(),
            noun,
            number,
        };
        let clause = |denied| Clause {
            subject: phrase(0, Number::Many, &[1, 2]),
            verb: 3,
            tense: Tense::Past,
            denied,
            object: phrase(1, Number::One, &[4]),
            adverb: (!denied).then_some(5),
        };
        let sentence = Sentence { clauses: vec![clause(true), clause(false)], kind: Kind::Question };
        assert_eq!(
            sentence.source(&lexicon).join(" "),
            "a0_ j1_ j2_ n0_s not v3_ed a1_ j4_ n1_ and a0_ j1_ j2_ n0_s v3_ed a1_ j4_ n1_ w5_ ?"
        );
        assert_eq!(
            sentence.target(&lexicon).join(" "),
            "what a0_en n0_t j2_en j1_en a1_or n1_ j4_or not v3_lem and a0_en n0_t j2_en j1_en a1_or n1_ j4_or w5_ v3_lem ."
        );
    }
}
