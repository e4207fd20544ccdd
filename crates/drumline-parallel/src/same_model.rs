//! Checks that all ranks have built the same model.

use std::collections::BTreeMap;

use drumline_comm::ProcessGroup;
use drumline_torch::Named;

use crate::error::ParallelError;

/// The maximum number of differences in an error.
const LISTED: usize = 5;

/// Compares names, sizes, kinds, strides and device types of all ranks' tensors. If a rank differs from rank 0, all
/// ranks return an error that names it.
pub(crate) fn check(group: &ProcessGroup, tensors: &[Named]) -> Result<(), ParallelError> {
    let mine: Vec<(String, String)> =
        tensors.iter().map(|named| (named.name.clone(), describe(named))).collect();
    let all = group.all_gather_object(&mine)?;
    let differs =
        all.iter().enumerate().find_map(|(rank, theirs)| Some((rank, difference(&all[0], theirs)?)));
    match differs {
        None => Ok(()),
        Some((rank, difference)) => Err(ParallelError::OtherModel { rank, difference }),
    }
}

fn describe(named: &Named) -> String {
    let tensor = &named.tensor;
    let place = if tensor.device().is_cuda() { ", on a GPU" } else { "" };
    format!("{:?} of {:?}, strides {:?}{place}", tensor.kind(), tensor.size(), tensor.stride())
}

fn difference(first: &[(String, String)], other: &[(String, String)]) -> Option<String> {
    let (a, b): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (first.iter().cloned().collect(), other.iter().cloned().collect());
    let missing = a.keys().filter(|name| !b.contains_key(*name)).map(|name| format!("it lacks `{name}`"));
    let more = b
        .keys()
        .filter(|name| !a.contains_key(*name))
        .map(|name| format!("it has `{name}`, which rank 0 has not"));
    let changed = b.iter().filter_map(|(name, theirs)| {
        let ours = a.get(name).filter(|ours| *ours != theirs)?;
        Some(format!("its `{name}` is {theirs}, on rank 0 {ours}"))
    });
    let mut listed: Vec<String> = changed.chain(missing).chain(more).collect();
    if listed.is_empty() {
        let place = first.iter().zip(other).position(|(a, b)| a.0 != b.0)?;
        return Some(format!("the same tensors in another order, from `{}` on", other[place].0));
    }
    let rest = listed.len().saturating_sub(LISTED);
    listed.truncate(LISTED);
    let more = if rest > 0 { format!(", and {rest} more") } else { String::new() };
    Some(listed.join(", ") + &more)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(tensors: &[(&str, &str)]) -> Vec<(String, String)> {
        tensors.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn differences_are_reported() {
        let first = model(&[("a", "f [1]"), ("b", "f [2]")]);
        assert_eq!(difference(&first, &first), None);
        let report = |other| difference(&first, &model(other)).unwrap_or_default();
        assert_eq!(report(&[("a", "f [3]"), ("b", "f [2]")]), "its `a` is f [3], on rank 0 f [1]");
        assert_eq!(report(&[("a", "f [1]")]), "it lacks `b`");
        assert_eq!(
            report(&[("b", "f [2]"), ("a", "f [1]")]),
            "the same tensors in another order, from `b` on"
        );
        let many: Vec<String> = (0..9).map(|i| format!("c{i}")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "f")).collect();
        assert!(
            report(&many).ends_with("it has `c2`, which rank 0 has not, and 6 more"),
            "{}",
            report(&many)
        );
    }
}
