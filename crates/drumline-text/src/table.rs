//! Reads examples for classification and tagging from the usual file formats.
//!
//! ```text
//!   .csv, .tsv      a header, then one example per row         ┐
//!   .jsonl, .json   one object per line                        ┴▶ Table: the texts and the label of each
//!   CoNLL           one word per line, in columns; a blank line between sentences ─▶ TaggedSentence: words and their tags
//! ```
//! Such data sets fit in memory. An example with an empty text is left out and counted. Everything else that is wrong is an
//! error that names the file and line.

mod conll;
mod delimited;
mod json_lines;

pub use conll::{ConllOptions, TaggedSentence, read_conll};

use crate::TextError;
use std::path::Path;

/// One row: what a classifier reads, and what it should predict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The texts, in the order of [`Fields::texts`].
    pub texts: Vec<String>,
    /// The label, if [`Fields::label`] names a field.
    pub label: Option<String>,
}

/// Which fields of a file become an example.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fields {
    /// The fields with text: one, or two for tasks on pairs of texts.
    pub texts: Vec<String>,
    /// The field with the label; `None` for data without labels.
    pub label: Option<String>,
    /// The names of the columns, for a CSV or TSV file without a header line.
    pub headers: Option<Vec<String>>,
}

impl Fields {
    /// One text and its label.
    pub fn labelled(text: &str, label: &str) -> Self {
        Self { texts: vec![text.to_owned()], label: Some(label.to_owned()), headers: None }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().chain(&self.label).map(String::as_str)
    }

    /// The example with these values, which are in the order of `names`.
    fn example(&self, mut values: Vec<String>) -> Example {
        let label = self.label.as_ref().and_then(|_| values.pop());
        Example { texts: values, label }
    }
}

/// The examples of a file.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("reviews.tsv");
/// use drumline_text::table::{Fields, Table};
///
/// std::fs::write(&path, "label\treview\nneg\ttoo long\npos\tlovely\npos\t\n")?;
/// let table = Table::read(&path, &Fields::labelled("review", "label"))?;
/// assert_eq!(table.examples[1].texts, ["lovely"]);
/// assert_eq!(table.examples[1].label.as_deref(), Some("pos"));
/// assert_eq!((table.examples.len(), table.left_out), (2, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    /// The examples, in the order of the file.
    pub examples: Vec<Example>,
    /// The line on which each example begins, from 1, for later errors.
    pub lines: Vec<u64>,
    /// The number of examples with an empty text, which are left out. Rank 0 should report it once.
    pub left_out: usize,
}

impl Table {
    /// Reads a file. The end of its name gives the format.
    pub fn read(path: impl AsRef<Path>, fields: &Fields) -> Result<Self, TextError> {
        let path = path.as_ref();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        let mut table = Self::default();
        match extension {
            "csv" => delimited::read(path, b',', fields, |line, example| table.push(line, example))?,
            "tsv" => delimited::read(path, b'\t', fields, |line, example| table.push(line, example))?,
            "jsonl" | "json" => json_lines::read(path, fields, |line, example| table.push(line, example))?,
            _ => {
                let what = "has an unknown format; try a name that ends in .csv, .tsv or .jsonl".to_owned();
                return Err(TextError::BadFile { path: path.to_owned(), what });
            }
        }
        if table.examples.is_empty() {
            let left_out = format!("{} with an empty text left out", table.left_out);
            return Err(TextError::NothingRemains { path: path.to_owned(), left_out });
        }
        Ok(table)
    }

    fn push(&mut self, line: u64, example: Example) {
        if example.texts.iter().any(|text| text.trim().is_empty()) {
            self.left_out += 1;
        } else {
            self.examples.push(example);
            self.lines.push(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &[u8], fields: &Fields) -> Result<Table, TextError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Table::read(path, fields)
    }

    fn example(text: &str, label: &str) -> Example {
        Example { texts: vec![text.to_owned()], label: Some(label.to_owned()) }
    }

    #[test]
    fn all_formats_give_the_same_examples() {
        let expected = [example("it is \"fine\", thanks", "1"), example("两 \"words", "0")];
        for (name, text) in [
            ("a.csv", "text,label\n\"it is \"\"fine\"\", thanks\",1\n\"两 \"\"words\",0\n"),
            ("a.csv", "\u{feff}text,id,label\r\n\"it is \"\"fine\"\", thanks\",7,1\r\n\"两 \"\"words\",8,0"),
            ("a.tsv", "label\ttext\n1\tit is \"fine\", thanks\n0\t两 \"words\n"),
            (
                "a.jsonl",
                "{\"text\":\"it is \\\"fine\\\", thanks\",\"label\":1}\n\n{\"label\":\"0\",\"text\":\"两 \\\"words\"}",
            ),
        ] {
            let table = read(name, text.as_bytes(), &Fields::labelled("text", "label")).unwrap();
            assert_eq!(table.examples, expected, "{text}");
        }
    }

    #[test]
    fn line_numbers_are_right_after_a_quoted_field_with_several_lines() {
        let fields = Fields::labelled("text", "label");
        let table = read("a.csv", b"text,label\n\"two\nlines\",1\n", &fields).unwrap();
        assert_eq!(table.examples, [example("two\nlines", "1")]);
        let table = read("a.csv", b"text,label\n\"two\nlines\",1\n,0\nx,1\n", &fields).unwrap();
        assert_eq!(table.lines, [2, 5]);
        let error = read("a.csv", b"text,label\n\"two\nlines\",1\nx\n", &fields).unwrap_err().to_string();
        assert!(error.contains("line 4 of"), "{error}");
    }

    #[test]
    fn headers_can_be_given_and_labels_can_be_missing() {
        let headers = Some(["label", "first", "second"].map(str::to_owned).to_vec());
        let fields = Fields { texts: vec!["second".to_owned(), "first".to_owned()], label: None, headers };
        let table = read("a.tsv", b"x\ta b\tc\ny\t \tc\n", &fields).unwrap();
        let expected = Example { texts: vec!["c".to_owned(), "a b".to_owned()], label: None };
        assert_eq!((table.examples, table.left_out), (vec![expected], 1));
    }

    #[test]
    fn errors_name_the_file_and_line() {
        let fields = Fields::labelled("text", "label");
        for (name, text, expected) in [
            ("a.csv", &b"text,lable\nx,1\n"[..], "line 1 of"),
            ("a.csv", b"text,lable\nx,1\n", "no field `label`; try one of: text, lable"),
            ("a.csv", b"text,label\nx,1\ny\n", "line 3 of"),
            ("a.csv", b"text,label\nx,1\n\xff,1\n", "line 3 of"),
            ("a.tsv", b"text\tlabel\n", "no sentences remain"),
            ("a.jsonl", b"{\"text\":\"x\",\"label\":1}\n{\"text\":\"y\"}\n", "line 2 of"),
            ("a.jsonl", b"{\"text\":\"x\"}\n", "no field `label`; try one of: text"),
            ("a.jsonl", b"{\"text\":\"x\",\"label\":[1]}\n", "line 1 of"),
            ("a.jsonl", b"{\"text\":\"x\",\n", "line 1 of"),
            ("a.jsonl", b"[1]\n", "line 1 of"),
            ("a.jsonl", b"\n{\"text\":\"\xfe\"}\n", "line 2 of"),
            ("a.xml", b"", "unknown format"),
        ] {
            let error = read(name, text, &fields).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(name), "{error}");
        }
        let error = Table::read("/nonexistent/a.csv", &fields).unwrap_err().to_string();
        assert!(error.starts_with("cannot read \"/nonexistent/a.csv\""), "{error}");
    }
}
