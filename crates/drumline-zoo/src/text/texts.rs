//! The texts of a file as words, with the labels beside them: the same for all formats.

use std::path::{Path, PathBuf};

use drumline_text::TextError;
use drumline_text::table::{ConllOptions, Fields, Table, TaggedSentence, read_conll};

use super::config::{Task, Text};

/// A text and what should be said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labelled {
    /// The words of each field.
    pub words: Vec<Vec<String>>,
    /// One, or one for each word.
    pub labels: Vec<String>,
    /// The line of each label, from 1.
    pub lines: Vec<u64>,
}

/// What a file has, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The file.
    pub path: PathBuf,
    /// Its texts.
    pub samples: Vec<Labelled>,
    /// Empty texts, which are none of them.
    pub left_out: usize,
}

impl Texts {
    /// Reads a file as a configuration says.
    pub fn read(path: &Path, keys: &Text) -> Result<Self, TextError> {
        let path = path.to_owned();
        let (samples, left_out) = match keys.task {
            Task::Classify => {
                let Table { examples, lines, left_out } = Table::read(&path, &fields(keys))?;
                let sample = |(example, line): (drumline_text::table::Example, u64)| Labelled {
                    words: example.texts.iter().map(|text| words(text, keys)).collect(),
                    labels: example.label.into_iter().collect(),
                    lines: vec![line],
                };
                (examples.into_iter().zip(lines).map(sample).collect(), left_out)
            }
            Task::Tag => {
                let sample = |TaggedSentence { words, tags, lines }| Labelled {
                    words: vec![words.into_iter().map(|word| cased(word, keys)).collect()],
                    labels: tags,
                    lines,
                };
                (read_conll(&path, &columns(keys))?.into_iter().map(sample).collect(), 0)
            }
        };
        Ok(Self { path, samples, left_out })
    }
}

fn fields(keys: &Text) -> Fields {
    Fields {
        texts: keys.fields.clone(),
        label: Some(keys.label.clone()),
        headers: (!keys.headers.is_empty()).then(|| keys.headers.clone()),
    }
}

fn columns(keys: &Text) -> ConllOptions {
    ConllOptions { word: keys.word_column, tag: keys.tag_column, comment: keys.comment.clone() }
}

fn words(text: &str, keys: &Text) -> Vec<String> {
    text.split_whitespace().map(|word| cased(word.to_owned(), keys)).collect()
}

fn cased(word: String, keys: &Text) -> String {
    if keys.lower { word.to_lowercase() } else { word }
}
