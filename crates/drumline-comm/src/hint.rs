//! What to try when ranks made different calls. The difference between the calls decides.

use std::collections::BTreeSet;

use crate::call::Trace;

/// The advice for these calls, to follow the word "try".
pub(crate) fn hint(calls: &[(usize, Trace)]) -> &'static str {
    let parts: Vec<Parts<'_>> = calls.iter().map(|(_, trace)| Parts::of(trace)).collect();
    let differ = |part: fn(&Parts<'_>) -> String| parts.iter().map(part).collect::<BTreeSet<_>>().len() > 1;
    let differs_in_call = differ(|parts| parts.op.into()) || differ(|parts| parts.site.into());
    if differs_in_call {
        "looking for a branch that not all ranks take"
    } else if differ(|parts| parts.sequence.to_string()) {
        "looking for a loop that one rank runs more often: fewer batches on some ranks, a `continue`, an evaluation on one rank only; for uneven numbers of batches there is `uneven` (docs/concepts.md, uneven inputs)"
    } else if differ(|parts| parts.dtype.into()) {
        "descriptors elements of the same type on all ranks"
    } else if differ(|parts| parts.lists.into()) {
        "descriptors the same list on all ranks"
    } else if differ(|parts| parts.count.into()) {
        "descriptors the same length on all ranks; a short last batch or a parameter that only some ranks have is a usual cause"
    } else if differ(|parts| parts.root.into()) {
        "descriptors the same root on all ranks"
    } else {
        "descriptors the same options on all ranks"
    }
}

/// A call's text, parsed: `op(count dtype, reduction, root N, lists XXXX)`. Calls of other ranks are known only as text.
#[derive(Debug, Default)]
struct Parts<'a> {
    sequence: u64,
    site: &'a str,
    op: &'a str,
    count: &'a str,
    dtype: &'a str,
    root: &'a str,
    lists: &'a str,
}

impl<'a> Parts<'a> {
    fn of(trace: &'a Trace) -> Self {
        let (op, arguments) = trace.what.split_once('(').unwrap_or((&trace.what, ""));
        let mut parts = Self { sequence: trace.sequence, site: &trace.site, op, ..Self::default() };
        for argument in arguments.trim_end_matches(')').split(", ") {
            match argument.split_once(' ') {
                Some(("root", rank)) => parts.root = rank,
                Some(("lists", hash)) => parts.lists = hash,
                Some((count, dtype)) => (parts.count, parts.dtype) = (count, dtype),
                None => {}
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(a: &str, b: &str, expected: &str) {
        let trace = |what: &str| Trace { sequence: 4, what: what.into(), site: "a.rs:1".into() };
        let hint = hint(&[(0, trace(a)), (1, trace(a)), (2, trace(b))]);
        assert!(hint.contains(expected), "{a} and {b}: {hint}");
    }

    #[test]
    fn the_advice_fits_the_difference() {
        check("barrier()", "all_reduce(8 f32, sum)", "branch");
        check("barrier()", "a call it did not report", "branch");
        check("all_reduce(8 f32, sum)", "all_reduce(9 f32, sum)", "same length");
        check("all_reduce(8 f32, sum)", "all_reduce(8 f64, sum)", "same type");
        check("all_reduce(8 f32, sum)", "all_reduce(8 f32, max)", "same options");
        check("broadcast(8 f32, root 0)", "broadcast(8 f32, root 1)", "same root");
        check("new_group(lists 01ab)", "new_group(lists 02ab)", "same list");
    }

    #[test]
    fn calls_from_different_lines_are_different_branches() {
        let trace = |count, site: &str| Trace {
            sequence: 4,
            what: format!("all_reduce({count} f32, sum)"),
            site: site.into(),
        };
        assert!(hint(&[(0, trace(1, "a.rs:17")), (1, trace(1000, "a.rs:14"))]).contains("branch"));
        assert!(
            hint(&[(0, trace(1, "a.rs:17")), (1, trace(1000, "a.rs:17"))]).contains("same length"),
            "control"
        );
    }

    #[test]
    fn a_line_that_one_rank_has_reached_more_often_is_in_a_loop() {
        let trace = |sequence, site: &str| Trace { sequence, what: "barrier()".into(), site: site.into() };
        let same_line = hint(&[(0, trace(4, "a.rs:1")), (1, trace(5, "a.rs:1"))]);
        assert!(same_line.contains("more often") && same_line.contains("uneven"), "{same_line}");
        assert!(!same_line.contains("branch"), "{same_line}");
        let other_line = hint(&[(0, trace(4, "a.rs:1")), (1, trace(5, "a.rs:2"))]);
        assert!(other_line.contains("branch"), "control: {other_line}");
    }
}
