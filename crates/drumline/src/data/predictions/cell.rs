//! Cells, and how a row of them is written.

use std::fmt::Write;

use super::{Prediction, PredictionFormat};

/// A value in a row.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Cell {
    /// A whole number.
    Int(i64),
    /// A number, written with enough digits to be read as the same number. NaN and infinities are `null` in JSON, which
    /// does not have them.
    Float(f64),
    /// A text.
    Text(String),
}

impl From<i64> for Cell {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for Cell {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<&str> for Cell {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Cell {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

/// A row's line, with its end.
pub(super) fn line(format: PredictionFormat, columns: &[String], row: &Prediction) -> String {
    let mut text = String::new();
    match format {
        PredictionFormat::Csv => {
            // Writing to a string cannot fail.
            let _ = write!(text, "{}", row.index);
            row.cells.iter().for_each(|cell| {
                text.push(',');
                push_csv(&mut text, cell);
            });
            text.push('\n');
        }
        PredictionFormat::JsonLines => {
            let _ = write!(text, "{{\"index\":{}", row.index);
            for (column, cell) in columns.iter().zip(&row.cells) {
                let _ = write!(text, ",{}:{}", serde_json::json!(column), json(cell));
            }
            text.push_str("}\n");
        }
    }
    text
}

/// The text before the first row.
pub(super) fn heading(format: PredictionFormat, columns: &[String]) -> String {
    match format {
        PredictionFormat::JsonLines => String::new(),
        PredictionFormat::Csv => {
            let mut text = "index".to_owned();
            columns.iter().for_each(|column| {
                text.push(',');
                push_quoted(&mut text, column);
            });
            text + "\n"
        }
    }
}

fn push_csv(text: &mut String, cell: &Cell) {
    let _ = match cell {
        Cell::Int(value) => write!(text, "{value}"),
        Cell::Float(value) => write!(text, "{value}"),
        Cell::Text(value) => return push_quoted(text, value),
    };
}

fn push_quoted(text: &mut String, value: &str) {
    if !value.contains([',', '"', '\n', '\r']) {
        return text.push_str(value);
    }
    text.push('"');
    text.push_str(&value.replace('"', "\"\""));
    text.push('"');
}

fn json(cell: &Cell) -> serde_json::Value {
    match cell {
        Cell::Int(value) => (*value).into(),
        Cell::Float(value) => (*value).into(),
        Cell::Text(value) => value.as_str().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_can_be_parsed_again() {
        let columns = ["label".to_owned(), "say \"p\"".to_owned(), "name".to_owned()];
        let cells = vec![(-3).into(), 0.1.into(), "a,b \"c\"".into()];
        let row = Prediction { index: 7, cells };
        assert_eq!(line(PredictionFormat::Csv, &columns, &row), "7,-3,0.1,\"a,b \"\"c\"\"\"\n");
        let json = line(PredictionFormat::JsonLines, &columns, &row);
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(read, serde_json::json!({"index": 7, "label": -3, "say \"p\"": 0.1, "name": "a,b \"c\""}));
        assert!(json.ends_with("}\n") && json.starts_with("{\"index\":7,\"label\":-3"));
        assert_eq!(heading(PredictionFormat::Csv, &columns), "index,label,\"say \"\"p\"\"\",name\n");
        let nan = Prediction { index: 0, cells: vec![f64::NAN.into()] };
        assert_eq!(line(PredictionFormat::JsonLines, &columns, &nan), "{\"index\":0,\"label\":null}\n");
        assert_eq!(line(PredictionFormat::Csv, &columns, &nan), "0,NaN\n");
    }
}
