//! Numbers in JSON, which has neither NaN nor infinity: those are written as null, and null is read as NaN.

use serde::{Deserialize, Deserializer, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;

use super::Metrics;

pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.is_finite() { serializer.serialize_f64(*value) } else { serializer.serialize_none() }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The bits of a NaN that no computation produces.
const MISSING: u64 = f64::NAN.to_bits() ^ 0x6e6f_6e65;

/// The value of a figure that is not in the line: a NaN, but different from the one for null.
pub(super) fn missing() -> f64 {
    f64::from_bits(MISSING)
}

/// Whether a figure was not in the line.
pub(super) fn is_missing(value: f64) -> bool {
    value.to_bits() == MISSING
}

/// The numbers and nulls among the other fields of a line. A text is no figure.
pub(super) fn only_numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metrics, D::Error> {
    let all = BTreeMap::<String, Value>::deserialize(deserializer)?;
    let numbers = all.into_iter().filter(|(_, value)| value.is_null() || value.is_number());
    Ok(numbers.map(|(name, value)| (name, value.as_f64())).collect())
}
