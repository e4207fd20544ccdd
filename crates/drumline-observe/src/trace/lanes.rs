//! Which spans of a track fit into one row: those that do not overlap, or are nested.

use std::cmp::Reverse;

/// The lane of each span, the first that it fits into.
pub(super) fn assign<T: Ord + Copy>(spans: &[(T, T)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    // The outer one of two that begin together comes first.
    order.sort_by_key(|at| (spans[*at].0, Reverse(spans[*at].1)));
    // For each lane the ends of the spans that are open, the innermost last.
    let mut open: Vec<Vec<T>> = Vec::new();
    let mut lanes = vec![0; spans.len()];
    for at in order {
        let (begin, end) = spans[at];
        for ends in &mut open {
            while ends.last().is_some_and(|last| *last <= begin) {
                ends.pop();
            }
        }
        let fits = |ends: &Vec<T>| ends.last().is_none_or(|last| end <= *last);
        lanes[at] = open.iter().position(fits).unwrap_or(open.len());
        if lanes[at] == open.len() {
            open.push(Vec::new());
        }
        open[lanes[at]].push(end);
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn spans_that_cross_are_in_different_lanes() {
        assert_eq!(assign(&[(0, 10), (2, 4), (4, 10), (5, 9)]), [0, 0, 0, 0], "within each other");
        assert_eq!(assign(&[(0, 5), (5, 9), (9, 9)]), [0, 0, 0], "one after the other");
        assert_eq!(assign(&[(0, 5), (3, 8), (4, 9), (8, 9)]), [0, 1, 2, 0], "across");
        assert_eq!(assign(&[(2, 3), (0, 9)]), [0, 0], "in any order");
        assert_eq!(assign::<u8>(&[]), [0_usize; 0]);
    }

    proptest! {
        #[test]
        fn no_two_spans_of_a_lane_cross(spans in proptest::collection::vec((0_u32..50, 0_u32..20), 0..60)) {
            let spans: Vec<_> = spans.into_iter().map(|(begin, len)| (begin, begin + len)).collect();
            let lanes = assign(&spans);
            for (one, first) in spans.iter().enumerate() {
                for (other, second) in spans.iter().enumerate() {
                    let crosses = first.0 < second.0 && second.0 < first.1 && first.1 < second.1;
                    prop_assert!(!(crosses && lanes[one] == lanes[other]), "{first:?} and {second:?}");
                }
            }
        }
    }
}
