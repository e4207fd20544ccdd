//! `--deepspeed FILE`: a `ds_config.json` as values of this configuration's keys. This is the one place that knows both.
//!
//! ```text
//!   --cfg FILE, KEY VALUE ─▶ Given: fills "auto" ─▶ DeepSpeedConfig::resolve ─▶ plan ─▶ pairs of our keys ─▶ table
//! ```
//!
//! A key that was given on both sides with different values is an error. A key that the file does not have keeps its
//! value.

mod given;
mod mapping;
mod names;

use std::collections::BTreeMap;
use std::path::PathBuf;

use drumline::config::deepspeed::{DeepSpeedConfig, DeepSpeedError, Explanation, Problem};

use super::error::{ConfigError, Place};
use super::table::Table;
use super::value::Value;
use super::{DeviceKind, Given, setting::Setting};
use mapping::{Mapped, Mapping};

/// A `ds_config.json` on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeepSpeedFile {
    /// The file, or its base64.
    pub(crate) argument: String,
    /// Whether keys that DeepSpeed does not have are errors.
    pub(crate) is_strict: bool,
    pub(crate) num_ranks: usize,
    /// The device of the command line.
    pub(crate) device: Option<DeviceKind>,
}

/// What was given beside it: the keys with their places.
pub(super) type Seen = BTreeMap<String, Place>;

/// Our key and its value, and the key of the file from which it comes.
pub(super) struct Pair {
    from: String,
    key: String,
    value: Value,
}

/// A file beside the values of a table.
pub(super) struct Applied {
    name: String,
    config: DeepSpeedConfig,
    pairs: Vec<Pair>,
    pub(super) explanation: Explanation,
    problems: Vec<Problem>,
}

impl Applied {
    /// The values of our keys, or all mistakes of the file in one error.
    pub(super) fn given(self) -> Result<Vec<Given>, ConfigError> {
        let Self { name, config, pairs, problems, .. } = self;
        if !problems.is_empty() {
            return Err(DeepSpeedError::Problems { file: name, problems }.into());
        }
        let line = |from: &str| config.position(from).map_or(1, |at| at.line as u64);
        let given = pairs.into_iter().map(|Pair { from, key, value }| {
            let place = Place::File { path: PathBuf::from(&name), line: line(&from) };
            Given { key, value, place }
        });
        Ok(given.collect())
    }
}

/// Reads the file, fills `"auto"` from the table, and maps the plan to keys of the table.
pub(super) fn apply<T: Table>(file: &DeepSpeedFile, table: &T, seen: &Seen) -> Result<Applied, ConfigError> {
    let config = DeepSpeedConfig::from_argument(&file.argument)?;
    let values = given::Values::of(table, seen, config.position("scheduler.type").is_some());
    let given = given::given(&values, file);
    let mut explanation = config.explain(&given);
    let mapped = match config.resolve(&given) {
        Ok(resolved) => Mapping::new(&config, &values, file.device).mapped(&resolved.plan),
        Err(DeepSpeedError::Problems { problems, .. }) => Mapped { problems, ..Mapped::default() },
        Err(error) => return Err(error.into()),
    };
    add(&mut explanation, &config, &mapped);
    let Mapped { pairs, problems, .. } = mapped;
    Ok(Applied { name: config.name().to_owned(), config, pairs, explanation, problems })
}

/// Adds to the explanation our keys, what has no effect in this program, and what it refuses.
fn add(explanation: &mut Explanation, config: &DeepSpeedConfig, mapped: &Mapped) {
    let Mapped { pairs, problems, idle } = mapped;
    for (line, setting) in explanation.lines.iter_mut().zip(config.settings()) {
        let Some(key) = setting.key().filter(|_| line.effect != "mistake") else { continue };
        let own = pairs.iter().filter(|pair| pair.from == key.path);
        let own: Vec<_> = own.map(|Pair { key, value, .. }| format!("{key} {value}")).collect();
        if !own.is_empty() {
            line.says = format!("{}; {}", own.join(", "), line.says);
        }
        if let Some((_, why)) = idle.iter().find(|(path, _)| *path == key.path) {
            (line.effect, line.says) = ("no effect", why.clone());
        }
        if let Some(problem) = problems.iter().find(|problem| problem.key == key.path) {
            (line.effect, line.says) = ("refused", problem.what.clone());
        }
    }
    if explanation.mistakes.is_empty() {
        explanation.mistakes = problems.iter().map(|problem| config.located(problem)).collect();
    }
}

fn written<S: Setting>(value: &S) -> Value {
    value.write()
}
