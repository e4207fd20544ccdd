//! The table of keys: each key of DeepSpeed with its type, its default, and what Drumline does with it.
//!
//! - `batch`: sizes, clipping, reporting
//! - `precision`: fp16, bf16, autocast
//! - `optimizer`: optimizers and schedules with their parameters
//! - `zero`: ZeRO and offload
//! - `blocks`: everything else
//!
//! The documentation's table is written from it.

mod batch;
mod blocks;
mod optimizer;
mod precision;
mod zero;

use std::sync::LazyLock;

use crate::config::json::Value;

/// The type of a key's values. All keys accept `null`, and `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number from 0, also as `5e8`.
    Whole,
    /// A whole number, also a negative one.
    Integer,
    /// A whole number from 0, or `Infinity`.
    WholeOrInfinity,
    /// Any number.
    Number,
    /// A text.
    Text,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A list of numbers.
    Numbers,
    /// A list of texts.
    Texts,
    /// A map whose keys are not checked. If it is refused, it may be there as long as nothing in it is `enabled`.
    Block,
    /// Any value.
    Any,
}

impl Kind {
    /// A description of the values.
    pub fn expects(self) -> String {
        match self {
            Self::Bool => "true or false".into(),
            Self::Whole => "a whole number".into(),
            Self::Integer => "a whole number, also a negative one".into(),
            Self::WholeOrInfinity => "a whole number or Infinity".into(),
            Self::Number => "a number".into(),
            Self::Text => "a text".into(),
            Self::Choice(names) => names.join(", "),
            Self::Numbers => "a list of numbers".into(),
            Self::Texts => "a list of texts".into(),
            Self::Block => "a map".into(),
            Self::Any => "any value".into(),
        }
    }
}

/// What Drumline does with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Carries it out.
    CarriedOut,
    /// Accepts it, because nothing needs doing.
    NotNeeded,
    /// Refuses values other than the default.
    Refused,
}

impl Effect {
    /// The word for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::CarriedOut => "carried out",
            Self::NotNeeded => "not needed",
            Self::Refused => "refused",
        }
    }
}

/// A key of DeepSpeed's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// Its path: `zero_optimization.stage`.
    pub path: &'static str,
    /// The type of its values.
    pub kind: Kind,
    /// DeepSpeed's default, in the spelling of a file; empty if there is none.
    pub default: &'static str,
    /// What `"auto"` becomes; without it, `"auto"` becomes the default.
    pub auto: Option<&'static str>,
    /// What Drumline does with it.
    pub effect: Effect,
    /// How, why not, or what to use instead.
    pub says: &'static str,
}

impl Key {
    const fn new(path: &'static str, kind: Kind, default: &'static str) -> Self {
        Self { path, kind, default, auto: None, effect: Effect::NotNeeded, says: "" }
    }

    const fn auto(self, from: &'static str) -> Self {
        Self { auto: Some(from), ..self }
    }

    const fn runs(self, says: &'static str) -> Self {
        Self { effect: Effect::CarriedOut, says, ..self }
    }

    const fn idle(self, says: &'static str) -> Self {
        Self { effect: Effect::NotNeeded, says, ..self }
    }

    const fn refused(self, says: &'static str) -> Self {
        Self { effect: Effect::Refused, says, ..self }
    }

    /// Its name without its section.
    pub fn name(&self) -> &'static str {
        self.path.rsplit('.').next().unwrap_or(self.path)
    }

    /// Whether a value of a refused key asks for nothing: it is off, or the default.
    pub(super) fn is_neutral(&self, value: &Value) -> bool {
        match value {
            Value::Null => true,
            Value::Bool(false) => self.default != "true",
            Value::Text(text) if text == "auto" => true,
            Value::Map(_) => self.kind == Kind::Block && !has_enabled(value),
            value => is_same(value, self.default),
        }
    }
}

/// Whether anything in a block is switched on.
fn has_enabled(value: &Value) -> bool {
    match value {
        Value::Map(entries) => entries.iter().any(|entry| {
            (entry.key == "enabled" && entry.node.value == Value::Bool(true))
                || has_enabled(&entry.node.value)
        }),
        Value::List(nodes) => nodes.iter().any(|node| has_enabled(&node.value)),
        _ => false,
    }
}

fn is_same(value: &Value, written: &str) -> bool {
    match value {
        Value::Number(number) => written.parse() == Ok(number.value),
        Value::Text(text) => text == written,
        value => value.to_string() == written,
    }
}

/// Every key, section by section.
pub static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let all = [batch::KEYS, precision::KEYS, optimizer::KEYS, zero::KEYS, blocks::KEYS];
    all.into_iter().flatten().copied().collect()
});

/// The key with this path.
pub(super) fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// The name of the first key of a section.
pub(super) fn first_key(section: &str) -> Option<&'static str> {
    let below = |key: &&Key| key.path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
    KEYS.iter().find(below)?.path[section.len() + 1..].split('.').next()
}

/// Whether keys have paths below this one.
pub(super) fn is_section(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// The table of all keys as Markdown, as it stands in the documentation.
pub fn key_table() -> String {
    let head = "| key | default | `\"auto\"` | here |\n|---|---|---|---|\n";
    let rows = KEYS.iter().map(|key| {
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        let auto = key.auto.unwrap_or_default();
        format!("| `{}` | {default} | {auto} | {}: {} |\n", key.path, key.effect.name(), key.says)
    });
    std::iter::once(head.to_owned()).chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::json::parse;
    use std::collections::BTreeSet;

    #[test]
    fn every_key_is_there_once_and_is_explained() {
        let mut seen = BTreeSet::new();
        for key in KEYS.iter() {
            assert!(seen.insert(key.path), "{} twice", key.path);
            assert!(!key.says.is_empty() && !key.says.ends_with('.'), "{}: {}", key.path, key.says);
            assert!(!is_section(key.path), "{} is a key and a section", key.path);
            let is_refused = key.effect == Effect::Refused;
            assert!(!is_refused || key.says.contains("try "), "{} is refused without advice", key.path);
        }
    }

    #[test]
    fn a_refused_key_is_fine_with_its_default() {
        for key in KEYS.iter().filter(|key| key.effect == Effect::Refused && !key.default.is_empty()) {
            let value = parse(key.default).unwrap().value;
            assert!(key.is_neutral(&value), "{}: {}", key.path, key.default);
        }
        let block = find("autotuning").unwrap();
        assert!(block.is_neutral(&parse("{enabled: false, fast: true}").unwrap().value));
        assert!(!block.is_neutral(&parse("{x: {enabled: true}}").unwrap().value));
    }

    #[test]
    fn the_guide_has_the_table() {
        let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/deepspeed.md");
        let guide = std::fs::read_to_string(guide).unwrap();
        let rows: Vec<_> = guide.lines().skip_while(|line| !line.starts_with("| key | default |")).collect();
        let rows: String =
            rows.iter().take_while(|line| line.starts_with('|')).map(|line| format!("{line}\n")).collect();
        assert!(rows == key_table(), "the table of docs/deepspeed.md should be:\n{}", key_table());
    }
}
