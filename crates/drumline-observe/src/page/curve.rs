//! A curve of any length in at most [`MOST_POINTS`] points, and what of it a browser does not have yet.
//!
//! ```text
//!   values   1 2 3 4 5 6 7        a point is the mean, the least and the greatest of `stride` values;
//!   points   [1 2] [3 4] [5 6] [7     the last one may still be filling.
//! ```
//!
//! When there would be too many points, each two become one and the stride doubles. Each point bears the version of the page
//! at which it changed last. Versions grow along the curve, so that what is new is always an end of it: `from` on.

use serde::Serialize;

/// More than a chart has pixels.
pub(super) const MOST_POINTS: usize = 2000;

/// Means of a value over the steps.
#[derive(Debug)]
pub(super) struct Curve {
    stride: u64,
    points: Vec<Point>,
    /// The version at which anything changed last.
    changed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Point {
    /// The last step of those in it.
    step: u64,
    count: u64,
    /// How many of them are no numbers.
    missing: u64,
    sum: f64,
    least: f64,
    greatest: f64,
    version: u64,
}

/// The end of a curve that a browser puts in place of its own, from the point `from` on.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct End {
    pub(super) from: usize,
    /// Step, mean, least, greatest. No mean where one of the values is no number.
    pub(super) points: Vec<(u64, Option<f32>, f32, f32)>,
}

impl Curve {
    pub(super) fn new() -> Self {
        Self { stride: 1, points: Vec::new(), changed: 0 }
    }

    /// Adds a value; one that is no number leaves a gap. A step before the last one is not told again.
    pub(super) fn push(&mut self, step: u64, value: f64, version: u64) {
        let value = Some(value).filter(|value| value.is_finite());
        self.changed = version;
        match self.points.last_mut() {
            Some(last) if step < last.step => {}
            Some(last) if last.count < self.stride => last.add(&Point::new(step, value, version)),
            _ => {
                if self.points.len() == MOST_POINTS {
                    self.halve(version);
                }
                self.points.push(Point::new(step, value, version));
            }
        }
    }

    /// Forgets what came after `step`: the run goes on from there.
    pub(super) fn cut_after(&mut self, step: u64, version: u64) {
        self.points.truncate(self.points.partition_point(|point| point.step <= step));
        self.changed = version;
    }

    /// What changed after the version `since`.
    pub(super) fn end_since(&self, since: u64) -> Option<End> {
        if self.changed <= since {
            return None;
        }
        let from = self.points.partition_point(|point| point.version <= since);
        Some(End { from, points: self.points[from..].iter().map(Point::shown).collect() })
    }

    fn halve(&mut self, version: u64) {
        let merged = self.points.chunks(2).map(|two| {
            let mut point = Point { version, ..two[0] };
            two[1..].iter().for_each(|next| point.add(&Point { version, ..*next }));
            point
        });
        self.points = merged.collect();
        self.stride *= 2;
    }
}

impl Point {
    fn new(step: u64, value: Option<f64>, version: u64) -> Self {
        let missing = u64::from(value.is_none());
        let least = value.unwrap_or(f64::INFINITY);
        let greatest = value.unwrap_or(f64::NEG_INFINITY);
        Self { step, count: 1, missing, sum: value.unwrap_or(0.0), least, greatest, version }
    }

    fn add(&mut self, next: &Self) {
        self.step = next.step;
        self.count += next.count;
        self.missing += next.missing;
        self.sum += next.sum;
        self.least = self.least.min(next.least);
        self.greatest = self.greatest.max(next.greatest);
        self.version = next.version;
    }

    fn shown(&self) -> (u64, Option<f32>, f32, f32) {
        let mean = (self.missing == 0).then(|| (self.sum / self.count as f64) as f32);
        (self.step, mean, self.least as f32, self.greatest as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn means(end: &End) -> Vec<(u64, Option<f32>)> {
        end.points.iter().map(|point| (point.0, point.1)).collect()
    }

    /// What a browser does with an end.
    fn apply(seen: &mut Vec<(u64, Option<f32>)>, end: Option<End>) {
        if let Some(end) = end {
            seen.truncate(end.from);
            seen.extend(means(&end));
        }
    }

    #[test]
    fn a_short_curve_is_told_value_by_value_and_once() {
        let mut curve = Curve::new();
        assert_eq!(curve.end_since(0), None);
        curve.push(1, 2.0, 1);
        curve.push(2, f64::NAN, 2);
        assert_eq!(means(&curve.end_since(0).unwrap()), [(1, Some(2.0)), (2, None)]);
        let end = curve.end_since(1).unwrap();
        assert_eq!((end.from, means(&end)), (1, vec![(2, None)]));
        assert_eq!(curve.end_since(2), None);
    }

    #[test]
    fn a_long_curve_has_few_points_that_keep_mean_and_extremes() {
        let mut curve = Curve::new();
        (0..100_000).for_each(|step| curve.push(step, if step == 77_777 { 50.0 } else { 1.0 }, 1));
        let end = curve.end_since(0).unwrap();
        assert!((MOST_POINTS / 2..=MOST_POINTS).contains(&end.points.len()));
        assert_eq!(end.points.last().unwrap().0, 99_999);
        assert!(end.points.iter().any(|point| point.3 == 50.0 && point.2 == 1.0));
        assert!(end.points.iter().filter(|point| point.3 > 1.0).count() == 1);
    }

    #[test]
    fn a_run_that_goes_on_loses_the_steps_done_again() {
        let mut curve = Curve::new();
        (1..=10).for_each(|step| curve.push(step, 1.0, 1));
        curve.cut_after(6, 2);
        let end = curve.end_since(1).unwrap();
        assert_eq!((end.from, end.points.len()), (6, 0));
        curve.push(7, 3.0, 3);
        assert_eq!(means(&curve.end_since(1).unwrap()), [(7, Some(3.0))]);
    }

    proptest! {
        #[test]
        fn a_browser_that_gets_ends_has_what_one_that_gets_all_has(
            pieces in prop::collection::vec((0_u64..700, any::<bool>()), 1..40)
        ) {
            let (mut curve, mut seen, mut step) = (Curve::new(), Vec::new(), 0);
            for (version, (length, looks)) in (1_u64..).zip(pieces) {
                for _ in 0..length {
                    step += 1;
                    curve.push(step, step as f64, version);
                }
                if length % 7 == 3 {
                    step = step.saturating_sub(length);
                    curve.cut_after(step, version);
                }
                if looks {
                    // The browser had looked at each version before this one, or at none of those since.
                    apply(&mut seen, curve.end_since(0));
                } else {
                    apply(&mut seen, curve.end_since(version - 1));
                }
                let all = curve.end_since(0).map(|end| means(&end)).unwrap_or_default();
                prop_assert_eq!(&seen, &all);
            }
        }
    }
}
