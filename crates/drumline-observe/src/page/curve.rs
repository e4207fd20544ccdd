//! A curve of any length in at most [`MOST_POINTS`] points, and the part of it that a browser does not have yet.
//!
//! ```text
//!   values   1 2 3 4 5 6 7        a point is the mean (by samples), the least and the greatest of `stride` values;
//!   points   [1 2] [3 4] [5 6] [7     the last one may still be filling.
//! ```
//!
//! When there would be too many points, every two become one and the stride doubles. Each point has the version of the page at
//! which it last changed. Versions grow along the curve, so that the new part is always an end of it: `from` on.
//!
//! Besides the points a curve has one figure for "now": that of the last steps together (`recent`), not of the last batch.

use serde::Serialize;

use crate::recent::Recent;

/// More than a chart has pixels.
pub(super) const MOST_POINTS: usize = 2000;

/// Means of a value over the steps.
#[derive(Debug)]
pub(super) struct Curve {
    now: Now,
    stride: u64,
    points: Vec<Point>,
    recent: Recent,
    /// The version at which anything changed last.
    changed: u64,
}

/// How the figure for "now" is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Now {
    /// The mean over the samples of the last steps.
    Mean,
    /// Their samples divided by their time.
    Rate,
    /// The last value: it was chosen, or is already a mean over many samples.
    Last,
}

/// A value of the curve.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) step: u64,
    /// Seconds of work since the run began, if known.
    pub(super) time: Option<f64>,
    pub(super) value: f64,
    /// Samples that it is a mean of.
    pub(super) samples: u64,
}

#[derive(Debug, Clone, Copy)]
struct Point {
    /// The last step of its values, and the time of that step.
    step: u64,
    time: Option<f64>,
    count: u64,
    /// How many of its values are no numbers.
    missing: u64,
    /// The sum of the values, each times its samples, and all samples.
    sum: f64,
    samples: f64,
    least: f64,
    greatest: f64,
    version: u64,
}

/// The end of a curve with which a browser replaces its own, from the point `from` on.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct End {
    pub(super) from: usize,
    /// Values in a point.
    pub(super) stride: u64,
    /// The figure for "now"; `None` if the last value is no number.
    pub(super) recent: Option<f64>,
    /// Step, mean, least, greatest, seconds of work, samples. The mean is missing if one of the values is no number.
    pub(super) points: Vec<ShownPoint>,
}

type ShownPoint = (u64, Option<f32>, f32, f32, Option<f32>, f64);

impl Curve {
    pub(super) fn new(now: Now) -> Self {
        Self { now, stride: 1, points: Vec::new(), recent: Recent::default(), changed: 0 }
    }

    /// Adds a value; one that is no number leaves a gap. A step before the last one is ignored.
    pub(super) fn push(&mut self, sample: Sample, version: u64) {
        self.changed = version;
        match self.points.last_mut() {
            Some(last) if sample.step < last.step => return,
            Some(last) if last.count < self.stride => last.add(&Point::new(sample, version)),
            _ => {
                if self.points.len() == MOST_POINTS {
                    self.halve(version);
                }
                self.points.push(Point::new(sample, version));
            }
        }
        self.recent.push(sample.value, sample.samples as f64);
    }

    /// Forgets what came after `step`: the run is resumed from there.
    pub(super) fn cut_after(&mut self, step: u64, version: u64) {
        self.points.truncate(self.points.partition_point(|point| point.step <= step));
        self.recent = Recent::default();
        self.changed = version;
    }

    /// What changed after the version `since`.
    pub(super) fn end_since(&self, since: u64) -> Option<End> {
        if self.changed <= since {
            return None;
        }
        let from = self.points.partition_point(|point| point.version <= since);
        let points = self.points[from..].iter().map(Point::shown).collect();
        Some(End { from, stride: self.stride, recent: self.now(), points })
    }

    fn now(&self) -> Option<f64> {
        match self.now {
            Now::Mean => self.recent.mean(),
            Now::Rate => self.recent.rate(),
            Now::Last => self.recent.last(),
        }
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
    fn new(sample: Sample, version: u64) -> Self {
        let Sample { step, time, value, samples } = sample;
        // If samples are not counted, all values have equal weight.
        let samples = samples.max(1) as f64;
        let value = Some(value).filter(|value| value.is_finite());
        let missing = u64::from(value.is_none());
        let least = value.unwrap_or(f64::INFINITY);
        let greatest = value.unwrap_or(f64::NEG_INFINITY);
        let sum = value.unwrap_or(0.0) * samples;
        Self { step, time, count: 1, missing, sum, samples, least, greatest, version }
    }

    fn add(&mut self, next: &Self) {
        (self.step, self.time) = (next.step, next.time.or(self.time));
        self.count += next.count;
        self.missing += next.missing;
        self.sum += next.sum;
        self.samples += next.samples;
        self.least = self.least.min(next.least);
        self.greatest = self.greatest.max(next.greatest);
        self.version = next.version;
    }

    fn shown(&self) -> ShownPoint {
        let mean = (self.missing == 0).then(|| (self.sum / self.samples) as f32);
        (
            self.step,
            mean,
            self.least as f32,
            self.greatest as f32,
            self.time.map(|time| time as f32),
            self.samples,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn push(curve: &mut Curve, step: u64, value: f64, version: u64) {
        curve.push(Sample { step, time: Some(step as f64 / 2.0), value, samples: 32 }, version);
    }

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
    fn a_short_curve_is_sent_value_by_value_and_once() {
        let mut curve = Curve::new(Now::Mean);
        assert_eq!(curve.end_since(0), None);
        push(&mut curve, 1, 2.0, 1);
        push(&mut curve, 2, f64::NAN, 2);
        assert_eq!(means(&curve.end_since(0).unwrap()), [(1, Some(2.0)), (2, None)]);
        let end = curve.end_since(1).unwrap();
        assert_eq!((end.from, means(&end)), (1, vec![(2, None)]));
        assert_eq!(curve.end_since(2), None);
        assert_eq!((end.stride, end.recent, end.points[0].4), (1, None, Some(1.0)));
    }

    #[test]
    fn the_figure_for_now_is_that_of_the_last_steps() {
        for (now, expected) in [(Now::Mean, 2.0 - 1.0 / 33.0), (Now::Rate, 33.0 / 17.0), (Now::Last, 1.0)] {
            let mut curve = Curve::new(now);
            curve.push(Sample { step: 1, time: None, value: 2.0, samples: 32 }, 1);
            // The last batch of an epoch.
            curve.push(Sample { step: 2, time: None, value: 1.0, samples: 1 }, 1);
            let recent = curve.end_since(0).unwrap().recent.unwrap();
            assert!((recent - expected).abs() < 1e-12, "{now:?}: {recent}");
        }
    }

    #[test]
    fn a_long_curve_has_few_points_that_keep_mean_and_extremes() {
        let mut curve = Curve::new(Now::Mean);
        (0..100_000).for_each(|step| push(&mut curve, step, if step == 77_777 { 50.0 } else { 1.0 }, 1));
        let end = curve.end_since(0).unwrap();
        assert!((MOST_POINTS / 2..=MOST_POINTS).contains(&end.points.len()));
        assert_eq!(end.points.last().unwrap().0, 99_999);
        assert!(end.points.iter().any(|point| point.3 == 50.0 && point.2 == 1.0));
        assert!(end.points.iter().filter(|point| point.3 > 1.0).count() == 1);
    }

    #[test]
    fn a_resumed_run_drops_the_steps_that_are_repeated() {
        let mut curve = Curve::new(Now::Mean);
        (1..=10).for_each(|step| push(&mut curve, step, 1.0, 1));
        curve.cut_after(6, 2);
        let end = curve.end_since(1).unwrap();
        assert_eq!((end.from, end.points.len()), (6, 0));
        push(&mut curve, 7, 3.0, 3);
        assert_eq!(means(&curve.end_since(1).unwrap()), [(7, Some(3.0))]);
    }

    proptest! {
        #[test]
        fn a_browser_that_gets_ends_has_the_same_as_one_that_gets_all(
            pieces in prop::collection::vec((0_u64..700, any::<bool>()), 1..40)
        ) {
            let (mut curve, mut seen, mut step) = (Curve::new(Now::Mean), Vec::new(), 0);
            for (version, (length, looks)) in (1_u64..).zip(pieces) {
                for _ in 0..length {
                    step += 1;
                    push(&mut curve, step, step as f64, version);
                }
                if length % 7 == 3 {
                    step = step.saturating_sub(length);
                    curve.cut_after(step, version);
                }
                if looks {
                    // The browser had seen each version before this one, or none of those since.
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
