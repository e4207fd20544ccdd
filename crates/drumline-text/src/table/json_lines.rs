//! Objects, one a line. Blank lines are passed over.

use super::{Example, Fields};
use crate::TextError;
use crate::lines::for_each_line;
use serde_json::{Map, Value};
use std::path::Path;

/// Hand each object to `take`.
pub(super) fn read(
    path: &Path,
    fields: &Fields,
    mut take: impl FnMut(u64, Example),
) -> Result<(), TextError> {
    for_each_line(path, |line, text| {
        if text.trim().is_empty() {
            return Ok(());
        }
        let bad = |what| TextError::BadLine { path: path.to_owned(), line, what };
        let object: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| bad(format!("is no JSON object: {error}; try one object a line")))?;
        let value = |name: &str| match object.get(name) {
            Some(found) => value(name, found).map_err(bad),
            None => {
                let known = object.keys().cloned().collect();
                Err(TextError::NoField { path: path.to_owned(), line, name: name.to_owned(), known })
            }
        };
        take(line, fields.example(fields.names().map(value).collect::<Result<_, _>>()?));
        Ok(())
    })
}

fn value(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        _ => Err(format!("has `{name}` that is neither text nor number")),
    }
}
