//! A value from YAML or a command line, before it is parsed as the type of its key.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, Spanned};

/// A scalar, a list, or a section of a file. Values from the command line are always texts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// `null`; the text `None` means the same.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A float.
    Float(f64),
    /// A text, which the type of the key interprets.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// Keys with their values, and the lines of the values in the file.
    Section(Vec<(String, Spanned<Value>)>),
}

impl Value {
    /// The value as JSON.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(value) => (*value).into(),
            Self::Int(value) => (*value).into(),
            Self::Float(value) => (*value).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(values) => values.iter().map(Self::to_json).collect(),
            Self::Section(pairs) => {
                pairs.iter().map(|(key, value)| (key.clone(), value.value.to_json())).collect()
            }
        }
    }

    /// A value of JSON.
    pub(crate) fn from_json(json: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match json {
            Json::Null => Self::Null,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => match number.as_i64() {
                Some(value) => Self::Int(value),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::Text(text.clone()),
            Json::Array(values) => Self::List(values.iter().map(Self::from_json).collect()),
            Json::Object(map) => Self::section(map.iter().map(|(key, value)| (key, Self::from_json(value)))),
        }
    }

    /// A section that does not come from a file.
    pub(crate) fn section<K: Into<String>>(pairs: impl IntoIterator<Item = (K, Self)>) -> Self {
        let spanned = |value| Spanned { value, referenced: Location::UNKNOWN, defined: Location::UNKNOWN };
        Self::Section(pairs.into_iter().map(|(key, value)| (key.into(), spanned(value))).collect())
    }
}

/// The value in YAML syntax.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => f.write_str(&float(*value)),
            Self::Text(text) if is_plain(text) => f.write_str(text),
            // A JSON string is also a YAML string.
            Self::Text(text) => write!(f, "{}", serde_json::Value::from(text.as_str())),
            Self::List(values) => {
                let values: Vec<_> = values.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", values.join(", "))
            }
            Self::Section(pairs) => {
                let pairs: Vec<_> =
                    pairs.iter().map(|(key, value)| format!("{key}: {}", value.value)).collect();
                write!(f, "{{{}}}", pairs.join(", "))
            }
        }
    }
}

/// A float with a point and a signed exponent: PyYAML would read other forms as text.
fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            ".nan".into()
        } else {
            format!("{}.inf", if value < 0.0 { "-" } else { "" })
        };
    }
    let text = format!("{value:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let point = if digits.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with('-') { "" } else { "+" };
    format!("{digits}{point}e{sign}{exponent}")
}

/// Whether a text needs no quotes in YAML 1.1 and 1.2.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 9] = ["null", "none", "true", "false", "yes", "no", "on", "off", "y"];
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '_');
    let begins = begins || text.starts_with("./") || text.starts_with("../");
    let rest = text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-+".contains(c));
    let lower = text.to_ascii_lowercase();
    begins && rest && lower != "n" && !WORDS.contains(&lower.as_str())
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, a text, true, false, null, a list or a section")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or_else(|_| Value::Text(value.to_string()), Value::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = values.next_element()? {
            list.push(value);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Value, A::Error> {
        let mut section = Vec::new();
        while let Some(pair) = pairs.next_entry()? {
            section.push(pair);
        }
        Ok(Value::Section(section))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_would_be_read_as_something_else_are_quoted() {
        for (text, written) in [
            ("./exp", "./exp"),
            ("None", "\"None\""),
            ("true", "\"true\""),
            ("12", "\"12\""),
            ("", "\"\""),
            ("a: b", "\"a: b\""),
            ("-x", "\"-x\""),
        ] {
            let shown = Value::Text(text.into()).to_string();
            assert_eq!(shown, written);
            assert_eq!(serde_saphyr::from_str::<Value>(&shown).unwrap(), Value::Text(text.into()));
        }
    }

    #[test]
    fn floats_are_written_for_pyyaml() {
        for (value, written) in
            [(5e-5, "5.0e-5"), (1e20, "1.0e+20"), (0.1, "0.1"), (1.0, "1.0"), (1.5e-9, "1.5e-9")]
        {
            assert_eq!(float(value), written);
            assert_eq!(serde_saphyr::from_str::<Value>(written).unwrap(), Value::Float(value));
        }
    }
}
