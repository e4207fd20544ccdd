//! What counts of all that was measured.
//!
//! A block gives one median for each unit. A series' figure at a case is the median of its blocks' medians; blocks taken
//! while the machine was unsteady count only when there is no steady one. Of several settings the fastest counts.

use super::contenders::Case;
use super::contest::{Calls, Sample};
use crate::bench::contest::{TallyOf, UnitOf};
use crate::bench::spread::median;
use crate::bench::tally::Turn;

/// What counts for one series at one case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figure {
    pub(crate) median_us: f64,
    pub(crate) setting: &'static str,
    /// No steady block was had.
    pub(crate) doubtful: bool,
}

/// The cases that anybody was measured at, in the order of measuring.
pub(crate) fn cases(tally: &TallyOf<Calls>) -> Vec<Case> {
    in_order(tally.all().map(|turn| turn.unit.case))
}

/// Each once, in the order of the first.
fn in_order<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut once = Vec::new();
    for one in all {
        if !once.contains(&one) {
            once.push(one);
        }
    }
    once
}

/// A series at a case, by its fastest setting.
pub(crate) fn figure(tally: &TallyOf<Calls>, case: Case, series: &str) -> Option<Figure> {
    let samples: Vec<Counted<'_>> =
        tally.all().filter(|turn| turn.unit.case == case).flat_map(counted).collect();
    let of_series = || samples.iter().filter(|counted| counted.sample.series == series);
    let settings = in_order(of_series().map(|counted| counted.setting));
    let figures = settings.into_iter().filter_map(|setting| {
        let of_setting: Vec<_> = of_series().filter(|counted| counted.setting == setting).collect();
        let steady: Vec<_> = of_setting.iter().filter(|counted| counted.steady).copied().collect();
        let doubtful = steady.is_empty();
        let counting = if doubtful { of_setting } else { steady };
        let median_us = median(counting.iter().map(|counted| counted.sample.median_us).collect())?;
        Some(Figure { median_us, setting, doubtful })
    });
    figures.min_by(|a, b| a.median_us.total_cmp(&b.median_us))
}

/// A sample with what is known of its turn.
struct Counted<'a> {
    sample: &'a Sample,
    setting: &'static str,
    steady: bool,
}

fn counted(turn: &Turn<UnitOf<Calls>, Vec<Sample>>) -> Vec<Counted<'_>> {
    let (setting, steady) = (turn.unit.contender.setting, turn.steady);
    turn.figures.iter().map(|sample| Counted { sample, setting, steady }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::contenders::{ALL_REDUCE, Kind};
    use super::*;
    use crate::bench::contender::Contender;
    use crate::bench::contest::Unit;
    use crate::bench::tally::Tally;

    const CASE: Case = Case { op: ALL_REDUCE, world: 2, bytes: 16 };

    fn tally(rows: &[(&'static str, &[(f64, bool)])]) -> TallyOf<Calls> {
        let mut tally = Tally::default();
        for (setting, samples) in rows {
            for (block, (median_us, steady)) in samples.iter().enumerate() {
                let contender = Contender { name: "openmpi", setting, kind: Kind::OpenMpi(&[]) };
                let sample = Sample { series: "openmpi".to_owned(), median_us: *median_us, p99_us: 9.0 };
                let unit = Unit { case: CASE, contender };
                tally.add(Turn { unit, block, figures: vec![sample], steady: *steady });
            }
        }
        tally
    }

    fn open_mpi(rows: &[(&'static str, &[(f64, bool)])]) -> Figure {
        figure(&tally(rows), CASE, "openmpi").unwrap()
    }

    #[test]
    fn one_wild_block_does_not_count() {
        let figure = open_mpi(&[("", &[(2.0, true), (90.0, true), (2.2, true)])]);
        assert_eq!((figure.median_us, figure.doubtful), (2.2, false));
    }

    #[test]
    fn unsteady_blocks_count_only_alone() {
        let mixed = open_mpi(&[("", &[(1.0, false), (2.0, true)])]);
        let alone = open_mpi(&[("", &[(1.0, false), (3.0, false)])]);
        assert_eq!((mixed.median_us, mixed.doubtful), (2.0, false));
        assert_eq!((alone.median_us, alone.doubtful), (2.0, true));
    }

    #[test]
    fn the_better_setting_counts_and_is_named() {
        let rows: &[(_, &[_])] = &[("plain", &[(5.0, true)]), ("yield", &[(4.0, true)])];
        assert_eq!(open_mpi(rows).setting, "yield");
        assert_eq!(figure(&tally(rows), CASE, "mpich"), None);
        assert_eq!(cases(&tally(rows)), [CASE]);
    }
}
