//! Reads the rows of CSV and TSV files with the `csv` crate.
//!
//! In CSV a quoted field may have commas and line ends. In TSV a quote is an ordinary character, as in public data sets, where a
//! single quote would otherwise swallow the rest of the file.

use super::{Example, Fields};
use crate::TextError;
use std::fs::File;
use std::path::Path;

/// Calls `visit` with the line and the example of each row.
pub(super) fn read(
    path: &Path,
    delimiter: u8,
    fields: &Fields,
    mut visit: impl FnMut(u64, Example),
) -> Result<(), TextError> {
    let file = File::open(path).map_err(|source| TextError::ReadFile { path: path.to_owned(), source })?;
    let mut rows = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .has_headers(fields.headers.is_none())
        .from_reader(file);
    let headers = match &fields.headers {
        Some(headers) => headers.clone(),
        None => {
            let headers = rows.headers().map_err(|error| text_error(path, error, 1))?;
            headers.iter().map(str::to_owned).collect()
        }
    };
    let places = places(path, fields, &headers)?;
    let mut row = csv::StringRecord::new();
    loop {
        let line = rows.position().line();
        if !rows.read_record(&mut row).map_err(|error| text_error(path, error, line))? {
            return Ok(());
        }
        let value = |place: &usize| row.get(*place).map(str::to_owned);
        let values: Option<Vec<_>> = places.iter().map(value).collect();
        let values = values.ok_or_else(|| wrong_columns(path, line, row.len(), headers.len()))?;
        visit(line, fields.example(values));
    }
}

/// The columns of the fields.
fn places(path: &Path, fields: &Fields, headers: &[String]) -> Result<Vec<usize>, TextError> {
    let place = |name: &str| {
        headers.iter().position(|header| header == name).ok_or_else(|| {
            let (path, name) = (path.to_owned(), name.to_owned());
            TextError::NoField { path, line: 1, name, known: headers.to_vec() }
        })
    };
    fields.names().map(place).collect()
}

fn wrong_columns(path: &Path, line: u64, found: usize, expected: usize) -> TextError {
    TextError::Columns { path: path.to_owned(), line, found, expected: expected.to_string() }
}

/// Adds the file's name to an error of the `csv` crate, and `line` if the error has no line.
fn text_error(path: &Path, error: csv::Error, line: u64) -> TextError {
    match error.into_kind() {
        csv::ErrorKind::Io(source) => TextError::ReadFile { path: path.to_owned(), source },
        csv::ErrorKind::Utf8 { pos, err } => {
            let line = pos.map_or(line, |pos| pos.line());
            let what =
                format!("is not UTF-8 in column {}; try `iconv -f ENCODING -t UTF-8`", err.field() + 1);
            TextError::BadLine { path: path.to_owned(), line, what }
        }
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            wrong_columns(path, pos.map_or(line, |pos| pos.line()), len as usize, expected_len as usize)
        }
        other => {
            TextError::BadLine { path: path.to_owned(), line, what: format!("cannot be read: {other:?}") }
        }
    }
}
