//! Checks of values that have the right type but cannot be used.

use super::error::ConfigError;

/// Returns an error for the first key whose value is 0.
pub(crate) fn at_least_1(keys: &[(&'static str, u64)]) -> Result<(), ConfigError> {
    match keys.iter().find(|(_, value)| *value == 0) {
        Some((key, _)) => invalid(key, "is 0; try 1 or more"),
        None => Ok(()),
    }
}

/// An error for the value of a key. `what` continues the sentence that the key begins.
pub(crate) fn invalid(key: &'static str, what: impl Into<String>) -> Result<(), ConfigError> {
    Err(ConfigError::Invalid { key, what: what.into() })
}

/// Returns an error for the first key whose value is negative.
pub(crate) fn not_negative(keys: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    match keys.iter().find(|(_, value)| *value < 0.0) {
        Some((key, value)) => invalid(key, format!("is {value}; try 0 or more")),
        None => Ok(()),
    }
}
