//! A file beside the table of keys: each of its lines with the key that it names.

use std::path::Path;

use super::aliases::{Renamed, misplaced, renamed};
use super::asked::Asked;
use super::error::{DeepSpeedError, Problem};
use super::given::Betas;
use super::keys::{self, Effect, Key, Kind};
use super::source::Source;
use super::{nearest, source};
use crate::config::json::{self, Node, Position, Value};

/// What a `ds_config.json` contains, key by key. Whether the values can be used together is decided by
/// [`resolve`](Self::resolve).
///
/// ```
/// use drumline::config::deepspeed::{DeepSpeedConfig, Given};
///
/// let text = r#"{
///     "train_batch_size": 64, // of all ranks
///     "gradient_accumulation_steps": 4,
///     "zero_optimization": {"stage": 2},
/// }"#;
/// let config = DeepSpeedConfig::parse("ds_config.json", text)?;
/// let plan = config.resolve(&Given::ranks(2))?.plan;
/// assert_eq!(plan.batch.micro_batch, 8);
/// # Ok::<(), drumline::config::deepspeed::DeepSpeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct DeepSpeedConfig {
    name: String,
    settings: Vec<Setting>,
}

/// A line of a file: a key with its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The key's path in the file's spelling: `zero_optimization.stage`.
    pub path: String,
    /// Where its value begins.
    pub at: Position,
    /// Its value, under the present name of the key.
    pub value: Value,
    /// Its value as JSON, under the name in the file.
    pub written: String,
    /// What the table of keys says about it.
    pub found: Found,
}

/// What the table of keys says about a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// It is a key, and its value has the right type.
    Key(&'static Key),
    /// It is an old name of a key.
    Old(&'static Key),
    /// Its value does not have the key's type.
    Wrong {
        /// The key.
        key: &'static Key,
        /// What its values are.
        expects: String,
    },
    /// It asks for something that does not exist here.
    Refused(&'static Key),
    /// It does nothing in this section.
    Misplaced(&'static str),
    /// DeepSpeed has no such key.
    Unknown {
        /// `; try …`, or nothing.
        advice: String,
    },
    /// A section whose value is not a map.
    NotASection,
}

impl Setting {
    /// The key that the line sets.
    pub fn key(&self) -> Option<&'static Key> {
        match self.found {
            Found::Key(key) | Found::Old(key) => Some(key),
            _ => None,
        }
    }

    /// Why the line cannot be used, if so. `is_strict`: keys that DeepSpeed does not have cannot be used either.
    pub(super) fn problem(&self, is_strict: bool) -> Option<Problem> {
        let what = match &self.found {
            Found::Key(_) | Found::Old(_) => return None,
            Found::Wrong { expects, .. } => format!("is {}; try {expects}", self.written),
            Found::Refused(key) => format!("is {}: {}", self.written, key.says),
            Found::NotASection => {
                let first = keys::first_key(&self.path).unwrap_or("enabled");
                format!("is {}, and it is a section; try {{\"{first}\": …}}", self.written)
            }
            Found::Misplaced(why) if is_strict => format!("does nothing: {why}; try without it"),
            Found::Unknown { advice } if is_strict => format!("is not a key of DeepSpeed{advice}"),
            Found::Misplaced(_) | Found::Unknown { .. } => return None,
        };
        Some(Problem { key: self.path.clone(), at: Some(self.at), what })
    }
}

impl DeepSpeedConfig {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, DeepSpeedError> {
        Self::of(source::file(path)?)
    }

    /// Reads a file, or the base64 of a file's text, as DeepSpeed does with its argument.
    pub fn from_argument(given: &str) -> Result<Self, DeepSpeedError> {
        Self::of(source::argument(given)?)
    }

    /// Reads a text. Errors call it `name`.
    pub fn parse(name: &str, text: &str) -> Result<Self, DeepSpeedError> {
        Self::of(Source { name: name.to_owned(), text: text.to_owned() })
    }

    fn of(source: Source) -> Result<Self, DeepSpeedError> {
        let Source { name, text } = source;
        let root = match json::parse(&text) {
            Ok(root) => root,
            Err(source) => return Err(DeepSpeedError::Json { file: name, source }),
        };
        let Value::Map(_) = root.value else { return Err(DeepSpeedError::NotAMap { file: name }) };
        let mut settings = Vec::new();
        add(&mut settings, &KeyPath::default(), &root);
        Ok(Self { name, settings })
    }

    /// The name of the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All lines, in the order of the file.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// Where a key's value is; `None` if the key is not in the file, or is null.
    pub fn position(&self, path: &str) -> Option<Position> {
        self.setting(path).filter(|setting| setting.value != Value::Null).map(|setting| setting.at)
    }

    /// Whether a key has a value other than `"auto"`.
    pub fn is_set(&self, path: &str) -> bool {
        matches!(self.asked(path, |_| Some(())), Asked::This(()))
    }

    /// Whether a key is true.
    pub fn is_on(&self, path: &str) -> bool {
        self.bool(path).value().unwrap_or(false)
    }

    /// Whether the file has this key, or keys of this section.
    pub fn has(&self, path: &str) -> bool {
        self.has_section(path) || self.position(path).is_some()
    }

    /// The line that sets a key. If an old name and a new one set it, it is the first.
    pub(super) fn setting(&self, path: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.key().is_some_and(|key| key.path == path))
    }

    /// Whether the file has keys in this section.
    pub(super) fn has_section(&self, section: &str) -> bool {
        let is_below = |path: &str| path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
        let is_given = |setting: &&Setting| setting.value != Value::Null;
        let given = self.settings.iter().filter(is_given);
        given.filter_map(Setting::key).any(|key| is_below(key.path))
    }

    pub(super) fn asked<T>(&self, path: &str, read: impl Fn(&Value) -> Option<T>) -> Asked<T> {
        match self.setting(path).map(|setting| &setting.value) {
            None | Some(Value::Null) => Asked::Nothing,
            Some(Value::Text(text)) if text == "auto" => Asked::Auto,
            Some(value) => read(value).map_or(Asked::Nothing, Asked::This),
        }
    }

    pub(super) fn bool(&self, path: &str) -> Asked<bool> {
        self.asked(path, as_bool)
    }

    pub(super) fn whole(&self, path: &str) -> Asked<u64> {
        self.asked(path, as_whole)
    }

    pub(super) fn number(&self, path: &str) -> Asked<f64> {
        self.asked(path, as_number)
    }

    pub(super) fn text(&self, path: &str) -> Asked<String> {
        self.asked(path, as_text)
    }

    pub(super) fn betas(&self, path: &str) -> Asked<Betas> {
        self.asked(path, |value| match as_numbers(value)?.as_slice() {
            [first, second] => Some(Betas(*first, *second)),
            _ => None,
        })
    }
}

/// A path in the file's spelling, and under its present name.
#[derive(Default, Clone)]
struct KeyPath {
    written: String,
    now: String,
    is_old: bool,
}

impl KeyPath {
    fn below(&self, key: &str) -> Self {
        let join = |path: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        Self { written: join(&self.written), now: join(&self.now), is_old: self.is_old }
    }
}

/// Adds the lines of a map.
fn add(settings: &mut Vec<Setting>, section: &KeyPath, map: &Node) {
    let Value::Map(entries) = &map.value else { return };
    for entry in entries {
        let mut path = section.below(&entry.key);
        let mut value = entry.node.value.clone();
        if let Some(Renamed { path: now, value: translated }) = renamed(&path.now, &value) {
            (path.now, path.is_old) = (now, true);
            value = translated.unwrap_or(value);
        }
        let is_map = matches!(value, Value::Map(_));
        if keys::is_section(&path.now) && (is_map || value == Value::Null) {
            add(settings, &path, &entry.node);
            continue;
        }
        let found = found(&path, &value);
        let written = entry.node.value.to_string();
        settings.push(Setting { path: path.written, at: entry.node.at, value, written, found });
    }
}

fn found(path: &KeyPath, value: &Value) -> Found {
    if let Some(why) = misplaced(&path.now) {
        return Found::Misplaced(why);
    }
    if keys::is_section(&path.now) {
        return Found::NotASection;
    }
    let Some(key) = keys::find(&path.now) else {
        return Found::Unknown { advice: nearest::advice(&path.now) };
    };
    if !has_type(key.kind, value) {
        return Found::Wrong { key, expects: key.kind.expects() };
    }
    if key.effect == Effect::Refused && !key.is_neutral(value) {
        return Found::Refused(key);
    }
    if path.is_old { Found::Old(key) } else { Found::Key(key) }
}

/// Whether a value has a type. `null` and `"auto"` have every type.
fn has_type(kind: Kind, value: &Value) -> bool {
    match (kind, value) {
        (_, Value::Null) => true,
        (_, Value::Text(text)) if text == "auto" => true,
        (Kind::Any, _) | (Kind::Block, Value::Map(_)) => true,
        (Kind::Block, value) => matches!(value, Value::Bool(false)),
        (Kind::Bool, value) => as_bool(value).is_some(),
        (Kind::Whole, value) => as_whole(value).is_some(),
        (Kind::Integer, value) => as_number(value).is_some_and(|number| number.fract() == 0.0),
        (Kind::WholeOrInfinity, value) => is_infinity(value) || as_whole(value).is_some(),
        (Kind::Number, value) => as_number(value).is_some(),
        (Kind::Text, value) => as_text(value).is_some(),
        (Kind::Choice(names), value) => as_text(value).is_some_and(|text| names.contains(&text.as_str())),
        (Kind::Numbers, value) => as_numbers(value).is_some(),
        (Kind::Texts, value) => match value {
            Value::List(nodes) => nodes.iter().all(|node| as_text(&node.value).is_some()),
            _ => false,
        },
    }
}

pub(super) fn as_bool(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::Text(text) => text.to_ascii_lowercase().parse().ok(),
        Value::Number(number) if number.value == 0.0 => Some(false),
        Value::Number(number) if number.value == 1.0 => Some(true),
        _ => None,
    }
}

pub(super) fn as_number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.value,
        Value::Text(text) => text.trim().parse().ok()?,
        _ => return None,
    };
    number.is_finite().then_some(number)
}

/// A whole number, however it is written. Larger ones than `u64` has are its largest: files use them for "no limit".
pub(super) fn as_whole(value: &Value) -> Option<u64> {
    as_number(value).filter(|number| *number >= 0.0 && number.fract() == 0.0).map(|number| number as u64)
}

fn is_infinity(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.value == f64::INFINITY,
        Value::Text(text) => text == "Infinity" || text == "inf",
        _ => false,
    }
}

/// A text. A number is accepted too: `"stage": 2` and `"stage": "2"` are the same.
pub(super) fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text.clone()),
        Value::Number(number) if number.value.fract() == 0.0 => Some(format!("{}", number.value)),
        _ => None,
    }
}

fn as_numbers(value: &Value) -> Option<Vec<f64>> {
    match value {
        Value::List(nodes) => nodes.iter().map(|node| as_number(&node.value)).collect(),
        _ => None,
    }
}
