//! From events to curves: the points of a metric, smoothed, and no more of them than a picture can show.

use super::{PlotError, PlotOptions, Run, Scale};
use crate::events::Event;

/// The most points of a curve in a picture. Of more, those are kept that are visible: where it begins, ends, and turns.
const MOST_POINTS: usize = 1200;

/// One metric of all runs.
pub(super) struct Panel {
    pub(super) metric: String,
    pub(super) curves: Vec<Curve>,
}

pub(super) struct Curve {
    pub(super) name: String,
    /// Curves of the same colour belong together.
    pub(super) color: usize,
    pub(super) kind: Kind,
    /// The lines to be drawn: a value that is no number splits a curve.
    pub(super) lines: Vec<Line>,
    /// The unsmoothed lines, drawn behind them if they are smoothed.
    pub(super) raw: Vec<Line>,
}

/// Step and value.
pub(super) type Line = Vec<(f64, f64)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Train,
    /// Has dots.
    Eval,
}

impl Panel {
    pub(super) fn new(runs: &[Run], metric: &str, options: PlotOptions) -> Result<Self, PlotError> {
        let is_one = runs.len() == 1;
        let mut curves = Vec::new();
        for (at, run) in runs.iter().enumerate() {
            for kind in [Kind::Train, Kind::Eval] {
                let name = match kind {
                    Kind::Train => run.name.clone(),
                    Kind::Eval => format!("{} (eval)", run.name),
                };
                let color = if is_one { kind as usize } else { at };
                curves.push(Curve::new(name, color, kind, &points(&run.events, metric, kind), options));
            }
        }
        curves.retain(|curve| !curve.lines.is_empty());
        if curves.is_empty() {
            let hint = match options.scale {
                Scale::Log => " on a logarithmic axis; try without --log",
                Scale::Linear => ": all are NaN or infinite",
            };
            return Err(PlotError::NothingToShow { metric: metric.to_owned(), hint });
        }
        Ok(Self { metric: metric.to_owned(), curves })
    }

    /// All points, for the axes.
    pub(super) fn points(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.curves.iter().flat_map(|curve| curve.lines.iter().chain(&curve.raw)).flatten().copied()
    }
}

impl Curve {
    fn new(name: String, color: usize, kind: Kind, points: &Line, options: PlotOptions) -> Self {
        let shown = |line: &Line| {
            let lines = broken(line, options.scale);
            lines.into_iter().map(|line| thinned(&line)).collect::<Vec<_>>()
        };
        // Evaluations are few, and are means already.
        let is_smoothed = options.smooth > 0.0 && kind == Kind::Train;
        let (lines, raw) = if is_smoothed {
            (shown(&smoothed(points, options.smooth)), shown(points))
        } else {
            (shown(points), Vec::new())
        };
        Self { name, color, kind, lines, raw }
    }
}

fn points(events: &[Event], metric: &str, kind: Kind) -> Line {
    let point = |event: &Event| {
        let step = match (event, kind) {
            (Event::Step(step), Kind::Train) => step.step,
            (Event::Eval(eval), Kind::Eval) => eval.step,
            _ => return None,
        };
        let (_, value) = event.figures().find(|(name, _)| *name == metric)?;
        Some((step as f64, value))
    };
    events.iter().filter_map(point).collect()
}

/// An exponential moving average, as TensorBoard's: `smooth` is the weight of the past after a step. The first values count in
/// full instead of being pulled towards 0.
fn smoothed(points: &Line, smooth: f64) -> Line {
    let (mut mean, mut weight) = (0.0, 0.0);
    let next = |&(step, value): &(f64, f64)| {
        if value.is_finite() {
            mean = smooth * mean + (1.0 - smooth) * value;
            weight = smooth * weight + (1.0 - smooth);
        }
        (step, if value.is_finite() { mean / weight } else { value })
    };
    points.iter().map(next).collect()
}

/// Splits the line at values that the axis cannot show; empty parts are left out.
fn broken(points: &Line, scale: Scale) -> Vec<Line> {
    let is_shown = |value: f64| value.is_finite() && (scale == Scale::Linear || value > 0.0);
    let parts = points.split(|(_, value)| !is_shown(*value));
    parts.filter(|part| !part.is_empty()).map(<[_]>::to_vec).collect()
}

/// Keeps of every few points in a row the first, the lowest, the highest and the last.
fn thinned(line: &Line) -> Line {
    let len = line.len().div_ceil(MOST_POINTS / 4);
    if len <= 4 {
        return line.clone();
    }
    let mut kept = Line::new();
    for part in line.chunks(len) {
        let by_value = |a: &&usize, b: &&usize| part[**a].1.total_cmp(&part[**b].1);
        let all: Vec<usize> = (0..part.len()).collect();
        let (lowest, highest) = (all.iter().min_by(by_value), all.iter().max_by(by_value));
        let mut chosen = vec![0, part.len() - 1];
        chosen.extend(lowest.into_iter().chain(highest));
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen.into_iter().map(|at| part[at]));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn smoothing_begins_with_the_first_value_and_goes_towards_the_last() {
        let line: Line = (0..200).map(|step| (step as f64, if step < 100 { 2.0 } else { 1.0 })).collect();
        let smooth = smoothed(&line, 0.9);
        assert!((smooth[0].1 - 2.0).abs() < 1e-9 && (smooth[99].1 - 2.0).abs() < 1e-9);
        assert!((smooth[199].1 - 1.0).abs() < 1e-3);
        // After n steps 0.9^n of the past is left.
        assert!((smooth[109].1 - (1.0 + 0.9_f64.powi(10))).abs() < 1e-3, "{:?}", smooth[109]);
        assert_eq!(smoothed(&line, 0.0), line);
    }

    #[test]
    fn a_value_that_is_no_number_splits_a_curve_but_not_its_smoothing() {
        let line = vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 1.0), (3.0, -1.0), (4.0, 1.0)];
        assert_eq!(broken(&line, Scale::Linear).len(), 2);
        assert_eq!(broken(&line, Scale::Log).len(), 3);
        assert!(smoothed(&line, 0.5)[2].1 == 1.0);
        assert!(broken(&vec![(0.0, f64::NAN)], Scale::Linear).is_empty());
    }

    proptest! {
        #[test]
        fn thinning_keeps_ends_and_extremes(values in proptest::collection::vec(-1e3..1e3, 1..20_000)) {
            let line: Line = values.iter().enumerate().map(|(at, value)| (at as f64, *value)).collect();
            let thin = thinned(&line);
            prop_assert!(thin.len() <= MOST_POINTS + 4 && thin.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert_eq!((thin.first(), thin.last()), (line.first(), line.last()));
            let extremes = |line: &Line| {
                let values = line.iter().map(|point| point.1);
                values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
            };
            prop_assert_eq!(extremes(&thin), extremes(&line));
        }
    }
}
