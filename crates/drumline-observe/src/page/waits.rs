//! Who waits for whom: decided from the collective that each rank is in.
//!
//! ```text
//!   rank 0  all_reduce #12 for 3 s ┐ wait for rank 1, which is in none,
//!   rank 1  computes               │ or, if all are in one, for those
//!   rank 2  all_reduce #12 for 3 s ┘ that are furthest behind
//! ```
//! Numbers are compared within a group only: each group counts its own collectives.

use std::collections::BTreeMap;

use super::ranks::{Condition, Row};

/// How many ranks are named; the others are counted.
const NAMED: usize = 4;

/// The ranks that have not arrived where others have waited for long. None if nobody waits for long, or all have arrived.
pub(super) fn late(rows: &[Row<'_>]) -> Vec<usize> {
    if !rows.iter().any(|row| row.condition == Condition::Waiting) {
        return Vec::new();
    }
    let absent: Vec<_> = rows.iter().filter(|row| op(row).is_none()).map(|row| row.status.rank).collect();
    if absent.is_empty() { furthest_behind(rows) } else { absent }
}

/// The ranks as text.
pub(super) fn named(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown = ranks.iter().take(NAMED).map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len().saturating_sub(NAMED) {
        0 => format!("{noun} {shown}"),
        more => format!("{noun} {shown} and {more} more"),
    }
}

/// The last ranks of a group in which another rank waits further ahead.
fn furthest_behind(rows: &[Row<'_>]) -> Vec<usize> {
    // For each group: the number of its last rank, and that of the furthest rank that has waited for long.
    let mut ends = BTreeMap::new();
    for (group, number, row) in
        rows.iter().filter_map(|row| place_of(row).map(|(group, at)| (group, at, row)))
    {
        let waits = if row.condition == Condition::Waiting { number } else { 0 };
        let (last, first) = ends.entry(group).or_insert((number, waits));
        (*last, *first) = (number.min(*last), waits.max(*first));
    }
    let is_last =
        |(group, number)| ends.get(group).is_some_and(|(last, first)| *last == number && *first > number);
    let behind = rows.iter().filter(|row| place_of(row).is_some_and(is_last));
    behind.map(|row| row.status.rank).collect()
}

/// The collective that a living rank is in.
fn op<'a>(row: &Row<'a>) -> Option<&'a str> {
    let is_alive = matches!(row.condition, Condition::Running | Condition::Waiting);
    row.status.op.as_deref().filter(|_| is_alive)
}

/// The group and number of a living rank's collective: `all_reduce(4 f32, sum) #9 of world at a.rs:1`.
fn place_of<'a>(row: &Row<'a>) -> Option<(&'a str, u64)> {
    let (_, rest) = op(row)?.split_once(" #")?;
    let (number, group) = rest.split_once(' ')?;
    let group = group.strip_prefix("of ")?.split(' ').next()?;
    Some((group, number.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::ranks::Ranks;
    use crate::status::{RankStatus, State};

    /// The late ranks, given each rank's collective and how long it has been in it.
    fn late(ranks: &[(Option<&str>, f64)]) -> Vec<usize> {
        let file = |(rank, (place, op_s)): (usize, &(Option<&str>, f64))| {
            let op = place.map(|place| format!("all_reduce(4 f32, sum) {place} at a #b.rs:1"));
            RankStatus { rank, op, op_s: *op_s, ..RankStatus::default() }
        };
        late_of(ranks.iter().enumerate().map(file).collect())
    }

    fn late_of(files: Vec<RankStatus>) -> Vec<usize> {
        let mut ranks = Ranks::default();
        ranks.update(files, 0.0);
        super::late(&ranks.rows(None, 0.0))
    }

    #[test]
    fn a_rank_in_no_collective_is_late_or_else_the_last_one() {
        let (ninth, eighth) = (Some("#9 of world"), Some("#8 of world"));
        assert_eq!(late(&[(ninth, 3.0), (None, 0.0), (ninth, 3.0), (None, 0.0)]), [1, 3]);
        assert_eq!(late(&[(ninth, 3.0), (None, 0.0), (eighth, 3.0)]), [1], "the last one waits for it");
        assert_eq!(late(&[(ninth, 3.0), (eighth, 0.2), (ninth, 3.0)]), [1]);
        assert_eq!(late(&[(Some("#10 of world"), 3.0), (ninth, 3.0), (eighth, 3.0)]), [2]);
    }

    #[test]
    fn few_are_named_and_more_are_counted() {
        assert_eq!(super::named(&[7]), "rank 7");
        assert_eq!(super::named(&[1, 2, 3, 4]), "ranks 1, 2, 3, 4");
        assert_eq!(super::named(&[0, 1, 2, 3, 5, 8]), "ranks 0, 1, 2, 3 and 2 more");
    }

    #[test]
    fn nobody_is_late_if_all_have_arrived_or_nobody_waits_for_long() {
        let ninth = Some("#9 of world");
        assert!(late(&[(ninth, 3.0), (ninth, 3.0)]).is_empty());
        assert!(late(&[(ninth, 0.3), (None, 0.0)]).is_empty());
        assert!(late(&[]).is_empty());
    }

    #[test]
    fn numbers_of_other_groups_and_unreadable_ones_are_not_compared() {
        let ninth = Some("#9 of world");
        for other in ["#3 of world/1", "#x of world", "3 of world", "#3", "#99999999999999999999 of world"] {
            assert!(late(&[(ninth, 3.0), (Some(other), 3.0)]).is_empty(), "{other}");
        }
        assert_eq!(late(&[(ninth, 3.0), (Some("#3 of world"), 3.0)]), [1], "control");
    }

    #[test]
    fn a_rank_that_has_failed_or_ended_is_late() {
        let op = Some("barrier() #9 of world at a.rs:1".to_owned());
        let waiting = RankStatus { op, op_s: 3.0, ..RankStatus::default() };
        for state in [State::Failed, State::Ended] {
            let over = RankStatus { rank: 1, state, ..waiting.clone() };
            assert_eq!(late_of(vec![waiting.clone(), over]), [1]);
        }
        assert!(late_of(vec![waiting.clone(), RankStatus { rank: 1, ..waiting }]).is_empty(), "control");
    }
}
