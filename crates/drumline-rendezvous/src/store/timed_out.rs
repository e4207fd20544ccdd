//! The error of a wait that nobody ended: how long it was, and for which keys it still is.

use super::Store;
use super::error::StoreError;
use super::request::Request;
use std::collections::HashSet;
use std::time::Instant;

/// Looks which keys of `request` are there by now, and leaves them out.
pub(super) fn timed_out(store: &(impl Store + ?Sized), request: &Request, began: Instant) -> StoreError {
    let after = began.elapsed();
    let keys = request.keys();
    let there =
        if keys.len() > 1 { store.list(common_prefix(&keys)).unwrap_or_default() } else { Vec::new() };
    let there: HashSet<&str> = there.iter().map(String::as_str).collect();
    let missing = request.only(|key| !there.contains(key));
    let what = match missing.keys().len() {
        // The last one came when the time was over.
        0 => request.to_string(),
        count if count == keys.len() => request.to_string(),
        count => format!("{missing} ({count} of {} keys)", keys.len()),
    };
    StoreError::Timeout { what, after }
}

/// What all keys begin with.
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
    fn prefixes() {
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
