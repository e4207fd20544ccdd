//! Reads JSON objects, one per line. Blank lines are skipped.

use super::{Example, Fields};
use crate::TextError;
use crate::lines::for_each_line;
use serde_json::{Map, Value};
use std::path::Path;

/// Calls `visit` with the line and the example of each object.
pub(super) fn read(
    path: &Path,
    fields: &Fields,
    mut visit: impl FnMut(u64, Example),
) -> Result<(), TextError> {
    for_each_line(path, |line, text| {
        if text.trim().is_empty() {
            return Ok(());
        }
        let bad = |what| TextError::BadLine { path: path.to_owned(), line, what };
        let object: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| bad(format!("is not a JSON object: {error}; try one object per line")))?;
        let value = |name: &str| match object.get(name) {
            Some(found) => {
                as_text(found).ok_or_else(|| bad(format!("has `{name}` that is neither text nor number")))
            }
            None => {
                let known = object.keys().cloned().collect();
                Err(TextError::NoField { path: path.to_owned(), line, name: name.to_owned(), known })
            }
        };
        visit(line, fields.example(fields.names().map(value).collect::<Result<_, _>>()?));
        Ok(())
    })
}

/// A text, number or truth value as text.
fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}
