//! Examples for classification and tagging from the files that such data comes in.
//!
//! ```text
//!   .csv, .tsv      a header, then a row an example            ┐
//!   .jsonl, .json   an object a line                           ┴▶ Table: texts and a label of each
//!   CoNLL           a word a line, columns; blank between sentences ─▶ TaggedSentence: words and their tags
//! ```
//! Such data sets fit in memory. An example with an empty text is left out and counted; whatever else is wrong is an
//! error with file and line.

mod conll;
mod delimited;
mod json_lines;

pub use conll::{ConllOptions, TaggedSentence, read_conll};

use crate::TextError;
use std::path::Path;

/// One row: what a classifier reads, and what it should say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The texts, in the order in which their fields were asked for.
    pub texts: Vec<String>,
    /// The label, if a field was asked for.
    pub label: Option<String>,
}

/// Which fields of a file become an example.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fields {
    /// Fields with text: one, or two to be compared.
    pub texts: Vec<String>,
    /// The field with the label; `None` for data to be labelled.
    pub label: Option<String>,
    /// Names of the columns of a CSV or TSV file that does not begin with them.
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

    /// An example of values in the order of `names`.
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
    /// In the order of the file.
    pub examples: Vec<Example>,
    /// The line on which each begins, from 1: for whoever finds something wrong with it later.
    pub lines: Vec<u64>,
    /// Examples with an empty text: to be told once, by rank 0.
    pub left_out: usize,
}

impl Table {
    /// Read a file of the format that its name ends with.
    pub fn read(path: impl AsRef<Path>, fields: &Fields) -> Result<Self, TextError> {
        let path = path.as_ref();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        let mut table = Self::default();
        match extension {
            "csv" => delimited::read(path, b',', fields, |line, example| table.take(line, example))?,
            "tsv" => delimited::read(path, b'\t', fields, |line, example| table.take(line, example))?,
            "jsonl" | "json" => json_lines::read(path, fields, |line, example| table.take(line, example))?,
            _ => {
                let what = "is of an unknown format; try a name that ends in .csv, .tsv or .jsonl".to_owned();
                return Err(TextError::BadFile { path: path.to_owned(), what });
            }
        }
        match table.examples.is_empty() {
            true => {
                let left_out = format!("{} with an empty text left out", table.left_out);
                Err(TextError::NothingRemains { path: path.to_owned(), left_out })
            }
            false => Ok(table),
        }
    }

    fn take(&mut self, line: u64, example: Example) {
        match example.texts.iter().any(|text| text.trim().is_empty()) {
            true => self.left_out += 1,
            false => {
                self.examples.push(example);
                self.lines.push(line);
            }
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
    fn all_formats_say_the_same() {
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
    fn a_quoted_field_has_lines_and_an_error_behind_it_the_right_number() {
        let fields = Fields::labelled("text", "label");
        let table = read("a.csv", b"text,label\n\"two\nlines\",1\n", &fields).unwrap();
        assert_eq!(table.examples, [example("two\nlines", "1")]);
        let table = read("a.csv", b"text,label\n\"two\nlines\",1\n,0\nx,1\n", &fields).unwrap();
        assert_eq!(table.lines, [2, 5]);
        let error = read("a.csv", b"text,label\n\"two\nlines\",1\nx\n", &fields).unwrap_err().to_string();
        assert!(error.contains("line 4 of"), "{error}");
    }

    #[test]
    fn headers_can_be_given_and_labels_left_out() {
        let headers = Some(["label", "first", "second"].map(str::to_owned).to_vec());
        let fields = Fields { texts: vec!["second".to_owned(), "first".to_owned()], label: None, headers };
        let table = read("a.tsv", b"x\ta b\tc\ny\t \tc\n", &fields).unwrap();
        let expected = Example { texts: vec!["c".to_owned(), "a b".to_owned()], label: None };
        assert_eq!((table.examples, table.left_out), (vec![expected], 1));
    }

    #[test]
    fn bad_files_are_told_by_name_and_line() {
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
