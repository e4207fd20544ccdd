//! Synthetic short stories to train a language model on, for use where no text can be downloaded.
//!
//! ```text
//!   Ada had a red kite. On Monday she took it to the lake. There she met Tom, who was sad. Tom had lost his kite.
//!   "You may have mine," said Ada. So Tom went home with the red kite, and Ada was glad.
//!   <|endoftext|>
//! ```
//! The persons, their pronouns, the thing and its colour follow from earlier sentences, so a model has to use its context.

use crate::beside::write_once;
use crate::random::Random;
use crate::{END_OF_TEXT, TextError};
use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// The sizes of the parts, and the seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthStoryOptions {
    /// The number of stories for training.
    pub train: usize,
    /// The number of stories for validation. None of them is in the training part.
    pub valid: usize,
    /// The seed of the stories.
    pub seed: u64,
}

impl Default for SynthStoryOptions {
    fn default() -> Self {
        Self { train: 3000, valid: 200, seed: 1234 }
    }
}

/// Writes `train.txt` and `valid.txt`, with [`END_OF_TEXT`] after each story.
///
/// The same options give the same bytes. It is an error if a file exists with different content; it is not overwritten.
///
/// ```
/// use drumline_text::synth_story::{self, SynthStoryOptions};
///
/// let folder = tempfile::tempdir()?;
/// synth_story::write(folder.path(), &SynthStoryOptions { train: 5, valid: 2, seed: 1 })?;
/// let text = std::fs::read_to_string(folder.path().join("train.txt"))?;
/// assert_eq!(text.matches("<|endoftext|>").count(), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(folder: impl AsRef<Path>, options: &SynthStoryOptions) -> Result<(), TextError> {
    let folder = folder.as_ref();
    let SynthStoryOptions { train, valid, seed } = *options;
    // The small part comes first, so that it does not depend on the size of the large one.
    let parts = [("valid", valid), ("train", train)];
    TextError::if_empty(parts, "stories")?;
    fs::create_dir_all(folder).map_err(|source| TextError::WriteFile { path: folder.to_owned(), source })?;
    let mut random = Random::new(seed, 0);
    let mut seen = HashSet::new();
    for (name, stories) in parts {
        let mut text = String::new();
        for _ in 0..stories {
            let story = loop {
                let story = draw(&mut random);
                if seen.insert(story.clone()) {
                    break story;
                }
            };
            text.push_str(&format!("{story}\n{END_OF_TEXT}\n"));
        }
        write_once(&folder.join(format!("{name}.txt")), text.as_bytes())?;
    }
    Ok(())
}

const WOMEN: [&str; 8] = ["Ada", "Mia", "Nora", "Ella", "Rosa", "Ines", "Lucy", "Vera"];
const MEN: [&str; 8] = ["Tom", "Ben", "Karl", "Noah", "Paul", "Emil", "Otto", "Jack"];
const COLOURS: [&str; 7] = ["red", "blue", "green", "yellow", "white", "black", "brown"];
const THINGS: [&str; 9] = ["kite", "ball", "hat", "boat", "drum", "book", "scarf", "lamp", "basket"];
const PLACES: [&str; 8] = ["lake", "market", "forest", "river", "garden", "school", "bridge", "harbour"];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const WEATHER: [&str; 5] =
    ["It was warm.", "It rained a little.", "The sun was out.", "A wind blew.", "Snow fell."];

/// A person, and the pronouns for the name.
#[derive(Clone, Copy)]
struct Person {
    name: &'static str,
    subject: &'static str,
    own: &'static str,
}

fn person(random: &mut Random) -> Person {
    let (names, subject, own) = if random.chance(0.5) { (&WOMEN, "she", "her") } else { (&MEN, "he", "his") };
    let name = *random.choose(names);
    Person { name, subject, own }
}

fn draw(random: &mut Random) -> String {
    let first = person(random);
    let second = loop {
        let other = person(random);
        if other.name != first.name {
            break other;
        }
    };
    let colour = random.choose(&COLOURS);
    let thing = random.choose(&THINGS);
    let place = random.choose(&PLACES);
    let mut parts = vec![format!("{} had a {colour} {thing}.", first.name)];
    if random.chance(0.4) {
        parts.push((*random.choose(&WEATHER)).to_owned());
    }
    parts.push(format!("On {} {} took it to the {place}.", random.choose(&DAYS), first.subject));
    parts.push(meeting(first, second, thing, random));
    parts.push(ending(first, second, &format!("{colour} {thing}"), random));
    parts.join(" ")
}

fn meeting(first: Person, second: Person, thing: &str, random: &mut Random) -> String {
    let Person { name, subject, own } = second;
    let met = format!("There {} met {name}", first.subject);
    match random.below(3) {
        0 => format!("{met}, who was sad. {name} had lost {own} {thing}."),
        1 => format!("{met}. \"I never had a {thing},\" {subject} said."),
        _ => format!("{met} and {own} dog. The dog barked at the {thing}."),
    }
}

fn ending(first: Person, second: Person, what: &str, random: &mut Random) -> String {
    let giver = first.name;
    let taker = second.name;
    match random.below(3) {
        0 => format!(
            "\"You may have mine,\" said {giver}. So {taker} went home with the {what}, and {giver} was glad."
        ),
        1 => format!("They played with the {what} until it was dark. Then {giver} and {taker} went home."),
        _ => format!("{giver} and {taker} hid the {what} under a tree. Nobody has found it since."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(options: &SynthStoryOptions) -> [String; 2] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), options).unwrap();
        ["train.txt", "valid.txt"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap())
    }

    #[test]
    fn stories_depend_on_the_seed_and_none_is_in_both_parts() {
        let small = SynthStoryOptions { train: 300, valid: 40, seed: 5 };
        let [train, valid] = made(&small);
        assert_eq!(made(&small), [train.clone(), valid.clone()]);
        assert_ne!(made(&SynthStoryOptions { seed: 6, ..small.clone() })[0], train);
        let stories = |text: &str| {
            text.split(END_OF_TEXT)
                .map(str::trim)
                .filter(|s| !s.is_empty())
                .map(str::to_owned)
                .collect::<HashSet<_>>()
        };
        let (train, valid) = (stories(&train), stories(&valid));
        assert_eq!((train.len(), valid.len(), train.intersection(&valid).count()), (300, 40, 0));
        assert!(train.iter().all(|story| story.ends_with('.')));
    }

    #[test]
    fn other_files_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("valid.txt"), "mine").unwrap();
        let error = write(folder.path(), &SynthStoryOptions::default()).unwrap_err().to_string();
        assert!(error.contains("was not overwritten"), "{error}");
        assert!(write(folder.path(), &SynthStoryOptions { valid: 0, ..Default::default() }).is_err());
    }
}
