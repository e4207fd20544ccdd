//! A configuration as a table of keys in sections: read from a file and `KEY VALUE` pairs, written as YAML.

use std::collections::BTreeSet;
use std::path::Path;

use drumline::config::deepspeed::Explanation;
use serde_json::{Map, Value as Json, json};

use super::deepspeed::{self, DeepSpeedFile, Seen};
use super::error::{ConfigError, Place};
use super::file::Known;
use super::section::{Entry, Section, WrongType};
use super::shared::TaskConfig;
use super::value::Value;
use super::{Given, file, nearest};

/// A configuration whose keys can be accessed by name.
pub(crate) trait Table: Default {
    /// All sections. A nested section, or a second struct with keys of the same section, must follow directly.
    fn sections(&self) -> Vec<&dyn Section>;

    /// All sections, mutable, in the same order.
    fn sections_mut(&mut self) -> Vec<&mut dyn Section>;

    /// Sets defaults that depend on other keys. `given` lists the keys that were given.
    fn settle(&mut self, given: &BTreeSet<String>);

    /// Returns an error for values that have the right type but cannot be used.
    fn check(&self) -> Result<(), ConfigError>;
}

/// Implements both lists of sections from the paths of their fields.
macro_rules! sections {
    ($($($field:ident).+),+ $(,)?) => {
        fn sections(&self) -> Vec<&dyn $crate::config::section::Section> {
            vec![$(&self.$($field).+),+]
        }

        fn sections_mut(&mut self) -> Vec<&mut dyn $crate::config::section::Section> {
            vec![$(&mut self.$($field).+),+]
        }
    };
}

/// The public functions of a configuration.
macro_rules! public_table {
    ($name:ident) => {
        impl $name {
            /// Loads the defaults, then the file, then the `KEY VALUE` pairs, and checks the result.
            pub fn load<S: AsRef<str>>(
                file: Option<&std::path::Path>,
                pairs: &[S],
            ) -> Result<Self, $crate::config::ConfigError> {
                $crate::config::table::load(file, pairs)
            }

            /// The configuration as YAML, which [`load`](Self::load) and Python can read.
            pub fn to_yaml(&self) -> String {
                $crate::config::table::to_yaml(self)
            }
        }
    };
}

/// The same for a task's configuration with a field `shared`, and the title of its schema.
macro_rules! task_table {
    ($name:ident, $title:literal) => {
        $crate::config::table::public_table!($name);

        impl $crate::config::TaskConfig for $name {
            const TITLE: &'static str = $title;

            fn shared(&self) -> $crate::config::SharedKeys {
                self.shared.clone()
            }

            fn set_device(&mut self, device: $crate::config::DeviceKind) {
                self.shared.run.device = device;
            }
        }
    };
}

pub(crate) use {public_table, sections, task_table};

/// Loads the defaults, then the file, then the pairs, and checks the result.
pub(crate) fn load<T: Table, S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<T, ConfigError> {
    let Filled { table, seen, .. } = filled(file, pairs)?;
    settled(table, seen)
}

/// The same with a `ds_config.json`, whose values are taken in between, and checked against both.
pub(crate) fn load_with_deepspeed<T: Table, S: AsRef<str>>(
    file: Option<&Path>,
    pairs: &[S],
    deepspeed: &DeepSpeedFile,
) -> Result<T, ConfigError> {
    let Filled { mut table, known, mut seen } = filled(file, pairs)?;
    for given in deepspeed::apply(deepspeed, &table, &seen)?.given()? {
        set(&mut table, &given, &known.keys)?;
        seen.insert(given.key, given.place);
    }
    settled(table, seen)
}

/// What each line of a `ds_config.json` does beside a file and pairs.
pub(crate) fn explain_deepspeed<T: Table, S: AsRef<str>>(
    file: Option<&Path>,
    pairs: &[S],
    deepspeed: &DeepSpeedFile,
) -> Result<Explanation, ConfigError> {
    let Filled { table, seen, .. } = filled::<T, S>(file, pairs)?;
    Ok(deepspeed::apply(deepspeed, &table, &seen)?.explanation)
}

/// A table with the values that were given, before it is checked.
struct Filled<T> {
    table: T,
    known: Known,
    seen: Seen,
}

fn filled<T: Table, S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<Filled<T>, ConfigError> {
    let mut table = T::default();
    let known = known(&table);
    let mut given = match file {
        Some(path) => file::read(path, &known)?,
        None => Vec::new(),
    };
    given.extend(overrides(pairs)?);
    let mut seen = Seen::new();
    for given in given {
        set(&mut table, &given, &known.keys)?;
        seen.insert(given.key, given.place);
    }
    Ok(Filled { table, known, seen })
}

fn known<T: Table>(table: &T) -> Known {
    let entries = entries(table);
    let takes_map = |entry: &&Entry| {
        let of = |schema: &Json| schema["type"] == "object";
        of(&entry.schema) || entry.schema["anyOf"].as_array().is_some_and(|any| any.iter().any(of))
    };
    let maps = entries.iter().filter(takes_map).map(|entry| entry.key.clone()).collect();
    Known { keys: entries.into_iter().map(|entry| entry.key).collect(), maps }
}

fn settled<T: Table>(mut table: T, seen: Seen) -> Result<T, ConfigError> {
    table.settle(&seen.into_keys().collect());
    table.check()?;
    Ok(table)
}

/// Every key with its value, type and description.
pub(crate) fn entries<T: Table>(table: &T) -> Vec<Entry> {
    table.sections().iter().flat_map(|section| section.entries()).collect()
}

/// Every key with its value as JSON.
pub(crate) fn to_json<T: Table>(table: &T) -> impl Iterator<Item = (String, serde_json::Value)> + use<T> {
    entries(table).into_iter().map(|entry| (entry.key, entry.value.to_json()))
}

/// The JSON schema of a configuration file. Editors use it to complete and explain keys.
pub(crate) fn schema<T: TaskConfig>() -> Json {
    let mut sections = Map::new();
    for entry in entries(&T::default()) {
        let Entry { key, value, mut schema, about, .. } = entry;
        (schema["description"], schema["default"]) = (about.into(), value.to_json());
        let mut names = key.split('.').collect::<Vec<_>>();
        let name = names.pop().unwrap_or_default().to_owned();
        names.into_iter().fold(&mut sections, section_of).insert(name, schema);
    }
    let mut schema = section_schema(&sections);
    (schema["$schema"], schema["title"]) =
        ("http://json-schema.org/draft-07/schema#".into(), T::TITLE.into());
    schema
}

/// The keys of a section, which is created if it does not exist.
fn section_of<'a>(within: &'a mut Map<String, Json>, name: &str) -> &'a mut Map<String, Json> {
    let section = within.entry(name).or_insert_with(|| section_schema(&Map::new()));
    section["properties"].as_object_mut().expect("a section has keys")
}

fn section_schema(keys: &Map<String, Json>) -> Json {
    json!({"type": "object", "properties": keys, "additionalProperties": false})
}

/// The configuration as YAML that [`load`] and Python's yacs can read.
pub(crate) fn to_yaml<T: Table>(table: &T) -> String {
    let (mut text, mut last) = (String::new(), "");
    for section in table.sections() {
        let prefix = section.prefix();
        let depth = if prefix.is_empty() { 0 } else { prefix.split('.').count() };
        let name = prefix.rsplit('.').next().unwrap_or_default();
        if prefix != last && !name.is_empty() {
            text.push_str(&format!("{}{name}:\n", "  ".repeat(depth - 1)));
        }
        last = prefix;
        for entry in section.entries() {
            let name = entry.key.rsplit('.').next().unwrap_or_default();
            text.push_str(&format!("{}{name}: {}\n", "  ".repeat(depth), entry.value));
        }
    }
    text
}

fn set<T: Table>(table: &mut T, given: &Given, known: &[String]) -> Result<(), ConfigError> {
    for section in table.sections_mut() {
        if let Some(outcome) = section.set(&given.key, &given.value) {
            return outcome.map_err(|WrongType { expects }| ConfigError::Value {
                key: given.key.clone(),
                got: given.as_typed(),
                expects,
                place: given.place.clone(),
            });
        }
    }
    let (key, place) = (given.key.clone(), given.place.clone());
    Err(ConfigError::Unknown { advice: nearest::advice(&key, known), key, place })
}

/// Parses `KEY VALUE KEY VALUE …`, as yacs does.
fn overrides<S: AsRef<str>>(words: &[S]) -> Result<Vec<Given>, ConfigError> {
    let pairs = words.chunks(2).map(|pair| match pair {
        [key, value] => {
            let (key, value) = (key.as_ref().to_owned(), Value::Text(value.as_ref().to_owned()));
            Ok(Given { key, value, place: Place::CommandLine })
        }
        _ => Err(ConfigError::NoValue { key: pair[0].as_ref().to_owned() }),
    });
    pairs.collect()
}

/// Asserts that the table of a documentation page has every key with its default.
#[cfg(test)]
pub(crate) fn assert_in_guide<T: Table>(page: &str) {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let guide = std::fs::read_to_string(guide).unwrap();
    let row = |entry: Entry| {
        format!("| `{}` | `{}` | {} | {} |", entry.key, entry.value, entry.expects, entry.about)
    };
    let rows: Vec<_> = entries(&T::default()).into_iter().map(row).collect();
    let table = guide.lines().skip_while(|line| !line.starts_with("| key | default |")).skip(2);
    let listed: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
    assert_eq!(listed, rows, "the table of {page} should be:\n{}", rows.join("\n"));
}
