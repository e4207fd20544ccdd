//! Texts of a file as words with labels, independent of the file's format.

use std::path::{Path, PathBuf};

use drumline_text::TextError;
use drumline_text::table::{ConllOptions, Fields, Table, TaggedSentence, read_conll};

use super::config::{Text, TextLabels, TextTask};

/// A text with its labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labelled {
    /// The words of each field.
    pub words: Vec<Vec<String>>,
    /// One label, one for each word, or none if labels are not read.
    pub labels: Vec<String>,
    /// The line number of each label, from 1.
    pub lines: Vec<u64>,
}

/// The texts of a file, in the file's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Texts {
    /// The file.
    pub path: PathBuf,
    /// Its texts.
    pub samples: Vec<Labelled>,
    /// The number of empty texts, which are left out.
    pub left_out: usize,
}

impl Texts {
    /// Reads a file as configured.
    pub fn read(path: &Path, keys: &Text, labels: &TextLabels) -> Result<Self, TextError> {
        Self::by_columns(path, keys, Some(labels)).map_err(|error| with_keys(error, keys, labels.task))
    }

    /// Reads a `.csv`, `.tsv` or `.jsonl` file without labels.
    pub fn unlabelled(path: &Path, keys: &Text) -> Result<Self, TextError> {
        Self::by_columns(path, keys, None).map_err(|error| with_keys(error, keys, TextTask::Classify))
    }

    fn by_columns(path: &Path, keys: &Text, labels: Option<&TextLabels>) -> Result<Self, TextError> {
        let path = path.to_owned();
        let (samples, left_out) = match labels {
            None | Some(TextLabels { task: TextTask::Classify, .. }) => {
                let Table { examples, lines, left_out } = Table::read(&path, &fields(keys, labels))?;
                let sample = |(example, line): (drumline_text::table::Example, u64)| Labelled {
                    words: example.texts.iter().map(|text| words(text, keys)).collect(),
                    labels: example.label.into_iter().collect(),
                    lines: vec![line],
                };
                (examples.into_iter().zip(lines).map(sample).collect(), left_out)
            }
            Some(labels) => {
                let sample = |TaggedSentence { words, tags, lines }| Labelled {
                    words: vec![words.into_iter().map(|word| cased(word, keys)).collect()],
                    labels: tags,
                    lines,
                };
                (read_conll(&path, &columns(labels))?.into_iter().map(sample).collect(), 0)
            }
        };
        Ok(Self { path, samples, left_out })
    }
}

fn fields(keys: &Text, labels: Option<&TextLabels>) -> Fields {
    Fields {
        texts: keys.fields.clone(),
        label: labels.map(|labels| labels.label.clone()),
        headers: (!keys.headers.is_empty()).then(|| keys.headers.clone()),
    }
}

fn columns(labels: &TextLabels) -> ConllOptions {
    ConllOptions { word: labels.word_column, tag: labels.tag_column, comment: labels.comment.clone() }
}

/// Adds the configuration keys to change to an error.
fn with_keys(error: TextError, keys: &Text, task: TextTask) -> TextError {
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
            let advice = match (task, keys.headers.is_empty()) {
                (TextTask::Tag, _) => "another TEXT.WORD_COLUMN or TEXT.TAG_COLUMN, which count from 0",
                (TextTask::Classify, true) => "quotes around a text that has commas",
                (TextTask::Classify, false) => "other TEXT.HEADERS, or quotes around a text that has commas",
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
    fn errors_about_columns_name_the_keys_to_change() {
        let plain = Text::default();
        let named = Text { headers: vec!["label".into(), "words".into()], ..Text::default() };
        for (name, content, keys, words) in [
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
                &plain,
                "has 2 columns, expected at least 4; try another TEXT.WORD_COLUMN or TEXT.TAG_COLUMN",
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            let task = if name.ends_with("conll") { TextTask::Tag } else { TextTask::Classify };
            let said = Texts::read(&path, keys, &TextLabels { task, ..TextLabels::default() })
                .unwrap_err()
                .to_string();
            assert!(said.contains(words) && said.contains(name), "{said}");
            assert!(!(name == "a.jsonl" && said.contains("HEADERS")), "{said}");
        }
    }
}
