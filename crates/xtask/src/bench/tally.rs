//! All that was measured, and what counts of it.
//!
//! A block gives one median for each unit. A series' figure at a case is the median of its blocks' medians; blocks taken
//! while the machine was unsteady count only when there is no steady one. Of several settings the fastest counts.

use super::contender::Case;
use std::collections::BTreeMap;

/// One unit's outcome.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) block: usize,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The machine was quiet and its cores were placed as wanted, before and after.
    pub(crate) steady: bool,
}

/// What counts for one series at one case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figure {
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The fastest and the slowest block that counted.
    pub(crate) range_us: (f64, f64),
    pub(crate) setting: String,
    /// No steady block was had.
    pub(crate) doubtful: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) case: Case,
    pub(crate) series: String,
    pub(crate) setting: String,
}

/// Every sample, by whom it is of.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    samples: BTreeMap<Key, Vec<Sample>>,
}

impl Tally {
    pub(crate) fn add(&mut self, key: Key, sample: Sample) {
        self.samples.entry(key).or_default().push(sample);
    }

    pub(crate) fn samples(&self) -> impl Iterator<Item = (&Key, &Sample)> {
        self.samples.iter().flat_map(|(key, samples)| samples.iter().map(move |sample| (key, sample)))
    }

    /// The cases that anybody was measured at, in order.
    pub(crate) fn cases(&self) -> Vec<Case> {
        let mut cases: Vec<_> = self.samples.keys().map(|key| key.case).collect();
        cases.dedup();
        cases
    }

    /// A series at a case, by its fastest setting.
    pub(crate) fn figure(&self, case: Case, series: &str) -> Option<Figure> {
        let mine = self.samples.iter().filter(|(key, _)| key.case == case && key.series == series);
        let figures = mine.filter_map(|(key, samples)| figure(&key.setting, samples));
        figures.min_by(|a, b| a.median_us.total_cmp(&b.median_us))
    }
}

fn figure(setting: &str, samples: &[Sample]) -> Option<Figure> {
    let steady: Vec<_> = samples.iter().filter(|sample| sample.steady).collect();
    let doubtful = steady.is_empty();
    let counted = if doubtful { samples.iter().collect() } else { steady };
    let medians: Vec<f64> = counted.iter().map(|sample| sample.median_us).collect();
    let p99s: Vec<f64> = counted.iter().map(|sample| sample.p99_us).collect();
    let range_us = (medians.iter().copied().reduce(f64::min)?, medians.iter().copied().reduce(f64::max)?);
    let (median_us, p99_us) = (median(medians)?, median(p99s)?);
    Some(Figure { median_us, p99_us, range_us, setting: setting.to_owned(), doubtful })
}

/// The middle value; of two middle ones their mean.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values[low] + values[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::super::contender::Op;
    use super::*;

    const CASE: Case = Case { op: Op::AllReduce, world: 2, bytes: 16 };

    fn tally(rows: &[(&str, &[(f64, bool)])]) -> Tally {
        let mut tally = Tally::default();
        for (setting, samples) in rows {
            for (block, (median_us, steady)) in samples.iter().enumerate() {
                let key = Key { case: CASE, series: "openmpi".into(), setting: (*setting).into() };
                tally.add(key, Sample { block, median_us: *median_us, p99_us: 9.0, steady: *steady });
            }
        }
        tally
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn one_wild_block_does_not_count() {
        let figure =
            tally(&[("", &[(2.0, true), (90.0, true), (2.2, true)])]).figure(CASE, "openmpi").unwrap();
        assert_eq!((figure.median_us, figure.range_us, figure.doubtful), (2.2, (2.0, 90.0), false));
    }

    #[test]
    fn unsteady_blocks_count_only_alone() {
        let mixed = tally(&[("", &[(1.0, false), (2.0, true)])]).figure(CASE, "openmpi").unwrap();
        let alone = tally(&[("", &[(1.0, false), (3.0, false)])]).figure(CASE, "openmpi").unwrap();
        assert_eq!((mixed.median_us, mixed.doubtful), (2.0, false));
        assert_eq!((alone.median_us, alone.doubtful), (2.0, true));
    }

    #[test]
    fn the_better_setting_counts_and_is_named() {
        let tally = tally(&[("plain", &[(5.0, true)]), ("yield", &[(4.0, true)])]);
        assert_eq!(tally.figure(CASE, "openmpi").unwrap().setting, "yield");
        assert_eq!(tally.figure(CASE, "mpich"), None);
    }
}
