//! Reads a configuration file, a map of keys and sections, into a flat list with line numbers.

use std::path::Path;

use serde_saphyr::{Location, Spanned, options};

use super::error::{ConfigError, Place};
use super::value::Value;
use super::{Given, near_file};

/// The keys that exist.
pub(super) struct Known {
    pub(super) keys: Vec<String>,
    /// Those whose values are maps.
    pub(super) maps: Vec<String>,
}

/// All values of a file, each with its full key.
pub(super) fn read(path: &Path, known: &Known) -> Result<Vec<Given>, ConfigError> {
    match root(path)? {
        // An empty file changes no key.
        Value::Null => Ok(Vec::new()),
        Value::Section(pairs) => {
            let mut given = Vec::new();
            for (key, value) in pairs {
                flatten(key, value, &Reader { path, known }, &mut given)?;
            }
            Ok(given)
        }
        _ => {
            let what =
                "the file is not a map of keys; try `TRAIN:` with `  BATCH_SIZE: 32` below it".to_owned();
            Err(ConfigError::Yaml { place: place(path, Location::UNKNOWN), what })
        }
    }
}

/// The top-level keys of a file, in its order.
pub(crate) fn top_keys(path: &Path) -> Result<Vec<String>, ConfigError> {
    match root(path)? {
        Value::Section(pairs) => Ok(pairs.into_iter().map(|(key, _)| key).collect()),
        _ => Ok(Vec::new()),
    }
}

fn root(path: &Path) -> Result<Value, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| {
        let advice = if path.is_file() { String::new() } else { near_file::advice(path) };
        ConfigError::Read { path: path.to_owned(), advice, source }
    })?;
    let options = options! { with_snippet: false };
    serde_saphyr::from_str_with_options(&text, options).map_err(|error| {
        let place = place(path, error.location().unwrap_or(Location::UNKNOWN));
        ConfigError::Yaml { place, what: what_is_wrong(&error) }
    })
}

fn what_is_wrong(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    let mut cause = error;
    while let Error::AliasError { error, .. } | Error::WithSnippet { error, .. } = cause {
        cause = error;
    }
    match cause {
        Error::Budget { .. } => {
            "the file has more values, or deeper ones, than a configuration may have, once its aliases (*name) are put in; try to write \
             values out instead of aliases of aliases"
                .to_owned()
        }
        _ => error.to_string().lines().next().unwrap_or_default().to_owned(),
    }
}

struct Reader<'a> {
    path: &'a Path,
    known: &'a Known,
}

/// Adds the value of `key` to the list, or each key in it if it is a section.
fn flatten(
    key: String,
    value: Spanned<Value>,
    reader: &Reader<'_>,
    given: &mut Vec<Given>,
) -> Result<(), ConfigError> {
    let place = place(reader.path, value.referenced);
    let wrong = |what: &str| Err(ConfigError::Yaml { place: place.clone(), what: format!("{key} {what}") });
    match value.value {
        value @ Value::Section(_) if reader.known.maps.contains(&key) => {
            given.push(Given { key, value, place });
            Ok(())
        }
        Value::Section(_) if reader.is_key(&key) => wrong("has no keys of its own; try a value after it"),
        Value::Section(pairs) => {
            for (name, value) in pairs {
                flatten(format!("{key}.{name}"), value, reader, given)?;
            }
            Ok(())
        }
        // `TRAIN:` with nothing below it.
        Value::Null if reader.is_section(&key) => Ok(()),
        _ if reader.is_section(&key) => wrong("has keys of its own; try them below it"),
        value => {
            given.push(Given { key, value, place });
            Ok(())
        }
    }
}

impl Reader<'_> {
    fn is_key(&self, key: &str) -> bool {
        self.known.keys.iter().any(|known| known == key)
    }

    fn is_section(&self, key: &str) -> bool {
        let below = format!("{key}.");
        self.known.keys.iter().any(|known| known.starts_with(&below))
    }
}

fn place(path: &Path, location: Location) -> Place {
    Place::File { path: path.to_owned(), line: location.line().max(1) }
}
