//! The error of a wait that timed out: how long it took, and which keys are still missing.

use super::Store;
use super::error::StoreError;
use super::request::Request;
use std::collections::HashSet;
use std::time::Instant;

/// Builds the timeout error, which lists only the keys that are still missing.
pub(super) fn timed_out(store: &(impl Store + ?Sized), request: &Request, began: Instant) -> StoreError {
    let after = began.elapsed();
    let keys = request.keys();
    let present =
        if keys.len() > 1 { store.list(common_prefix(&keys)).unwrap_or_default() } else { Vec::new() };
    let present: HashSet<&str> = present.iter().map(String::as_str).collect();
    let missing = request.only(|key| !present.contains(key));
    let what = match missing.keys().len() {
        // The last key arrived just after the deadline.
        0 => request.to_string(),
        count if count == keys.len() => request.to_string(),
        count => format!("{missing} ({count} of {} keys)", keys.len()),
    };
    StoreError::Timeout { what, after }
}

/// The longest common prefix of all keys.
fn common_prefix<'a>(keys: &[&'a str]) -> &'a str {
    let Some((first, rest)) = keys.split_first() else { return "" };
    let shared = |key: &str| first.char_indices().zip(key.chars()).find(|((_, a), b)| a != b);
    let ends = rest.iter().map(|key| shared(key).map_or(first.len().min(key.len()), |((at, _), _)| at));
    &first[..ends.min().unwrap_or(first.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefixes() {
        for (keys, expected) in [
            (&["here/1", "here/2", "here/30"][..], "here/"),
            (&["a", "ab"], "a"),
            (&["ab", "a"], "a"),
            (&["éa", "èa"], ""),
            (&["é1", "é2"], "é"),
            (&["x", "y"], ""),
            (&["same", "same"], "same"),
        ] {
            assert_eq!(common_prefix(keys), expected, "{keys:?}");
        }
    }
}
