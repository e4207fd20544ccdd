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
        Self::by_columns(path, keys).map_err(|error| with_keys(error, keys))
    }

    fn by_columns(path: &Path, keys: &Text) -> Result<Self, TextError> {
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

/// The same error with the keys that mend it.
fn with_keys(error: TextError, keys: &Text) -> TextError {
    match error {
        TextError::NoField { path, line, name, known } => {
            let key = if keys.fields.contains(&name) { "TEXT.FIELDS" } else { "TEXT.LABEL" };
            let has_columns = path.extension().is_some_and(|ending| ending == "csv" || ending == "tsv");
            let headers = match (has_columns, keys.headers.is_empty()) {
                (true, true) => "; or TEXT.HEADERS, if the file does not begin with the names of its columns",
                (true, false) => "; or other TEXT.HEADERS",
                (false, _) => "",
            };
            let known = known.join(", ");
            let what = format!("has no field `{name}`; try another {key}, of: {known}{headers}");
            TextError::BadLine { path, line, what }
        }
        TextError::Columns { path, line, found, expected } => {
            let advice = match (keys.task, keys.headers.is_empty()) {
                (Task::Tag, _) => "another TEXT.WORD_COLUMN or TEXT.TAG_COLUMN, which count from 0",
                (Task::Classify, true) => "quotes around a text that has commas",
                (Task::Classify, false) => "other TEXT.HEADERS, or quotes around a text that has commas",
            };
            let what = format!("has {found} columns, expected {expected}; try {advice}");
            TextError::BadLine { path, line, what }
        }
        other => other,
    }
}

fn words(text: &str, keys: &Text) -> Vec<String> {
    text.split_whitespace().map(|word| cased(word.to_owned(), keys)).collect()
}

fn cased(word: String, keys: &Text) -> String {
    if keys.lower { word.to_lowercase() } else { word }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_columns_names_the_keys_that_mend_it() {
        let plain = Text::default();
        let named = Text { headers: vec!["label".into(), "words".into()], ..Text::default() };
        let tags = Text { task: Task::Tag, ..Text::default() };
        for (name, content, keys, told) in [
            (
                "a.csv",
                "text,lable\nx,1\n",
                &plain,
                "no field `label`; try another TEXT.LABEL, of: text, lable; or TEXT.HEADERS, if",
            ),
            (
                "a.tsv",
                "1\tx\n",
                &named,
                "no field `text`; try another TEXT.FIELDS, of: label, words; or other TEXT.HEADERS",
            ),
            ("a.jsonl", "{\"text\":\"x\"}\n", &plain, "no field `label`; try another TEXT.LABEL, of: text"),
            ("a.csv", "text,label\nx,y,1\n", &plain, "line 2 of"),
            ("a.csv", "text,label\nx,y,1\n", &plain, "has 3 columns, expected 2; try quotes around"),
            (
                "a.conll",
                "Ada B-PER\n",
                &tags,
                "has 2 columns, expected at least 4; try another TEXT.WORD_COLUMN or TEXT.TAG_COLUMN",
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            let said = Texts::read(&path, keys).unwrap_err().to_string();
            assert!(said.contains(told) && said.contains(name), "{said}");
            assert!(!(name == "a.jsonl" && said.contains("HEADERS")), "{said}");
        }
    }
}
