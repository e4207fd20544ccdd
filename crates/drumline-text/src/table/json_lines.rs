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
        let values: Result<Vec<_>, _> = fields.names().map(|name| value(&object, name)).collect();
        take(line, fields.example(values.map_err(bad)?));
        Ok(())
    })
}

fn value(object: &Map<String, Value>, name: &str) -> Result<String, String> {
    match object.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => Ok(value.to_string()),
        Some(_) => Err(format!("has `{name}` that is neither text nor number")),
        None => {
            let names: Vec<_> = object.keys().map(String::as_str).collect();
            Err(format!("has no `{name}`; try one of: {}", names.join(", ")))
        }
    }
}
