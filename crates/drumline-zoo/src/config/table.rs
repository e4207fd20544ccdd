//! A configuration as a table of keys in sections: read from a file and from `KEY VALUE` pairs, written as YAML.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::error::{ConfigError, Place};
use super::section::{Entry, Section};
use super::value::Value;
use super::{Given, file, nearest};

/// A configuration whose keys are known by name.
pub(crate) trait Table: Default {
    /// Its sections; one within another right behind that.
    fn sections(&self) -> Vec<&dyn Section>;

    /// The same, to be changed.
    fn sections_mut(&mut self) -> Vec<&mut dyn Section>;

    /// Fills in what follows from keys that nobody has given.
    fn settle(&mut self, given: &BTreeSet<String>);

    /// Refuses values that are of the right type and still cannot be used.
    fn check(&self) -> Result<(), ConfigError>;
}

/// The defaults, changed by the file, changed by the pairs, and checked.
pub(crate) fn load<T: Table, S: AsRef<str>>(file: Option<&Path>, pairs: &[S]) -> Result<T, ConfigError> {
    let mut table = T::default();
    let known: Vec<_> = entries(&table).into_iter().map(|entry| entry.key).collect();
    let mut given = match file {
        Some(path) => file::read(path, &known)?,
        None => Vec::new(),
    };
    given.extend(overrides(pairs)?);
    let mut seen = BTreeSet::new();
    for given in given {
        set(&mut table, &given, &known)?;
        seen.insert(given.key);
    }
    table.settle(&seen);
    table.check()?;
    Ok(table)
}

/// Every key with its value, what it takes and what it is for.
pub(crate) fn entries<T: Table>(table: &T) -> Vec<Entry> {
    table.sections().iter().flat_map(|section| section.entries()).collect()
}

/// Every key with its value, for programs.
pub(crate) fn to_json<T: Table>(table: &T) -> impl Iterator<Item = (String, serde_json::Value)> + use<T> {
    entries(table).into_iter().map(|entry| (entry.key, entry.value.to_json()))
}

/// What a file may hold, as a JSON schema: editors complete keys, and show what they are for, by it.
pub(crate) fn schema<T: Table>(title: &str) -> Json {
    let mut sections = Map::new();
    for entry in entries(&T::default()) {
        let Entry { key, value, mut schema, about, .. } = entry;
        (schema["description"], schema["default"]) = (about.into(), value.to_json());
        let mut names = key.split('.').collect::<Vec<_>>();
        let name = names.pop().unwrap_or_default().to_owned();
        names.into_iter().fold(&mut sections, section_of).insert(name, schema);
    }
    let mut schema = section_schema(sections);
    (schema["$schema"], schema["title"]) = ("http://json-schema.org/draft-07/schema#".into(), title.into());
    schema
}

/// The keys of a section, which is made if it is not there.
fn section_of<'a>(within: &'a mut Map<String, Json>, name: &str) -> &'a mut Map<String, Json> {
    let section = within.entry(name).or_insert_with(|| section_schema(Map::new()));
    section["properties"].as_object_mut().expect("a section has keys")
}

fn section_schema(keys: Map<String, Json>) -> Json {
    json!({"type": "object", "properties": keys, "additionalProperties": false})
}

/// As YAML, in a form that [`load`] and Python's yacs read.
pub(crate) fn to_yaml<T: Table>(table: &T) -> String {
    let mut text = String::new();
    for section in table.sections() {
        let prefix = section.prefix();
        let depth = if prefix.is_empty() { 0 } else { prefix.split('.').count() };
        if let Some(name) = prefix.rsplit('.').next().filter(|name| !name.is_empty()) {
            text.push_str(&format!("{}{name}:\n", "  ".repeat(depth - 1)));
        }
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
            return outcome.map_err(|expects| ConfigError::Value {
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

/// `KEY VALUE KEY VALUE …`, as yacs takes it.
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
