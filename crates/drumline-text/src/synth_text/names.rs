//! News with the names of people, places and companies.

use super::Tagged;
use crate::random::Random;

const FIRST: [&str; 12] =
    ["Ada", "Bruno", "Clara", "Dora", "Emil", "Frieda", "Georg", "Hanna", "Ivan", "Jana", "Karl", "Lena"];
const LAST: [&str; 12] =
    ["Grove", "Stone", "Brook", "Field", "Wood", "Rivers", "Hall", "Marsh", "Ford", "Lane", "Banks", "Frost"];
const PLACES: [&str; 10] =
    ["Corby", "Arlen", "Weston", "Harrow", "Selby", "Linden", "Marlow", "Eden", "Kirkby", "Dorset"];
const COMPANIES: [&str; 6] = ["Bank", "Motors", "Press", "Foods", "Airlines", "Steel"];

/// A part of a sentence.
#[derive(Clone, Copy)]
enum Part {
    Words(&'static str),
    Person,
    Place,
    Company,
}

use Part::{Company, Person, Place, Words};

const SENTENCES: [&[Part]; 8] = [
    &[Person, Words("works for"), Company, Words("in"), Place, Words(".")],
    &[Words("yesterday"), Person, Words("met"), Person, Words("at the station .")],
    &[Company, Words("has opened an office in"), Place, Words(".")],
    &[Words("the people of"), Place, Words("do not like"), Company, Words(".")],
    &[Person, Words("left"), Company, Words("after ten years .")],
    &[Words("trains from"), Place, Words("to"), Place, Words("were late , said"), Person, Words(".")],
    &[Company, Words("buys"), Company, Words(", says"), Person, Words("of"), Place, Words(".")],
    &[Words("in"), Place, Words("nobody has seen"), Person, Words("this week .")],
];

pub(super) fn draw(random: &mut Random) -> Tagged {
    let mut sentence = Tagged::new();
    for part in *random.choose(&SENTENCES) {
        let (kind, words) = match part {
            Words(words) => {
                sentence.extend(words.split(' ').map(|word| (word, "O".to_owned())));
                continue;
            }
            Person => ("PER", person(&mut sentence, random)),
            Place => ("LOC", place(random)),
            Company => ("ORG", company(random)),
        };
        let prefixes = std::iter::once("B").chain(std::iter::repeat("I"));
        sentence
            .extend(words.into_iter().zip(prefixes).map(|(word, prefix)| (word, format!("{prefix}-{kind}"))));
    }
    sentence
}

/// A first name, a last name or both. A title before a last name is not part of the name.
fn person(sentence: &mut Tagged, random: &mut Random) -> Vec<&'static str> {
    match random.below(4) {
        0 => vec![pick(&FIRST, random)],
        1 => {
            sentence.push(("Dr", "O".to_owned()));
            vec![pick(&LAST, random)]
        }
        _ => vec![pick(&FIRST, random), pick(&LAST, random)],
    }
}

fn place(random: &mut Random) -> Vec<&'static str> {
    let name = pick(&PLACES, random);
    match random.below(4) {
        0 => vec!["New", name],
        1 => vec![name, "Hill"],
        _ => vec![name],
    }
}

fn company(random: &mut Random) -> Vec<&'static str> {
    match random.below(3) {
        0 => vec![pick(&LAST, random), "&", "Sons"],
        1 => vec![pick(&LAST, random), pick(&COMPANIES, random)],
        _ => vec![pick(&PLACES, random), pick(&COMPANIES, random)],
    }
}

fn pick(words: &[&'static str], random: &mut Random) -> &'static str {
    words[random.below(words.len())]
}
