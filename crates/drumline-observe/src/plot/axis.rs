//! The ticks of an axis and their labels: a few round numbers.
//!
//! A *place* is the position of a value on the axis: the value itself, or its logarithm to the base of 10.

use std::ops::Range;

use super::Scale;

/// An axis that covers some values.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    scale: Scale,
    /// The places of its two ends.
    pub(super) range: Range<f64>,
    /// Places of the ticks.
    pub(super) marks: Vec<f64>,
}

impl Axis {
    /// `room` is how much wider the axis is than the values, relative to their range; `most` is the most ticks.
    pub(super) fn around(values: impl Iterator<Item = f64>, scale: Scale, room: f64, most: usize) -> Self {
        let places = values.map(|value| place(scale, value));
        let ends =
            places.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), at| (low.min(at), high.max(at)));
        let (low, high) = match ends {
            // All values are equal.
            (low, high) if high - low < 1e-12 * high.abs().max(1e-300) => {
                (low - aside(low), high + aside(low))
            }
            ends => ends,
        };
        let room = (high - low) * room;
        let range = low - room..high + room;
        let marks = match scale {
            Scale::Linear => round_numbers(&range, most),
            Scale::Log => round_ratios(&range, most),
        };
        Self { scale, range, marks }
    }

    pub(super) fn place(&self, value: f64) -> f64 {
        place(self.scale, value)
    }

    /// The position of a place along the axis, from 0 to 1.
    pub(super) fn part(&self, place: f64) -> f64 {
        (place - self.range.start) / (self.range.end - self.range.start)
    }

    /// The label of a tick.
    pub(super) fn label(&self, mark: f64) -> String {
        match (self.scale, self.marks.as_slice()) {
            (Scale::Log, _) => significant(10_f64.powf(mark)),
            (Scale::Linear, [first, second, ..]) => {
                let largest = self.range.start.abs().max(self.range.end.abs());
                written(mark, second - first, largest)
            }
            (Scale::Linear, _) => significant(mark),
        }
    }
}

fn place(scale: Scale, value: f64) -> f64 {
    match scale {
        Scale::Linear => value,
        Scale::Log => value.log10(),
    }
}

fn aside(place: f64) -> f64 {
    if place == 0.0 { 1.0 } else { place.abs() * 0.1 }
}

/// With as many decimals as the distance of two ticks needs; thousands as `k`, millions as `M`.
fn written(value: f64, apart: f64, largest: f64) -> String {
    let (unit, suffix) = match largest {
        largest if largest >= 1e6 => (1e6, "M"),
        largest if largest >= 1e4 => (1e3, "k"),
        largest if largest < 1e-3 => return exponential(value),
        _ => (1.0, ""),
    };
    let (value, apart) = (value / unit, apart / unit);
    let decimals = (-apart.log10() - 1e-9).ceil().clamp(0.0, 6.0) as usize;
    if value.abs() < apart * 1e-6 { "0".to_owned() } else { format!("{value:.decimals$}{suffix}") }
}

/// With three digits, without trailing zeros.
fn significant(value: f64) -> String {
    let apart = 10_f64.powf(value.abs().log10().floor() - 2.0);
    let text = written(value, apart, value.abs());
    let (digits, suffix) = text.split_at(text.trim_end_matches(['k', 'M']).len());
    if digits.contains('.') && !digits.contains('e') {
        digits.trim_end_matches('0').trim_end_matches('.').to_owned() + suffix
    } else {
        text
    }
}

/// `2e-5`, `1.5e-5`
fn exponential(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let exponent = (value.abs().log10() + 1e-9).floor();
    let digits = format!("{:.1}", value / 10_f64.powf(exponent));
    format!("{}e{exponent}", digits.trim_end_matches(".0"))
}

/// Multiples of 1, 2 or 5 times a power of ten within a range, at most `most`.
fn round_numbers(range: &Range<f64>, most: usize) -> Vec<f64> {
    let least = (range.end - range.start) / most as f64;
    let power = 10_f64.powf(least.log10().floor());
    let apart = [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|apart| *apart >= least);
    let apart = apart.unwrap_or(10.0 * power);
    let (first, last) = ((range.start / apart).ceil() as i64, (range.end / apart).floor() as i64);
    (first..=last).map(|times| times as f64 * apart).collect()
}

/// Powers of ten within a range of logarithms, with their multiples by 2 and 5 if there is room; numbers as on a linear axis if
/// the values do not even double.
fn round_ratios(range: &Range<f64>, most: usize) -> Vec<f64> {
    let within = |multiples: &[f64], every: i32| -> Vec<f64> {
        let powers =
            (range.start.floor() as i32..=range.end.ceil() as i32).filter(|power| power % every == 0);
        let marks =
            powers.flat_map(|power| multiples.iter().map(move |times| f64::from(power) + times.log10()));
        marks.filter(|mark| range.contains(mark)).collect()
    };
    let fine = within(&[1.0, 2.0, 5.0], 1);
    if fine.len() < 3 {
        let values = 10_f64.powf(range.start)..10_f64.powf(range.end);
        return round_numbers(&values, most).into_iter().filter(|at| *at > 0.0).map(f64::log10).collect();
    }
    if fine.len() <= most {
        return fine;
    }
    (1..).map(|every| within(&[1.0], every)).find(|marks| marks.len() <= most).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(values: &[f64], scale: Scale) -> Vec<String> {
        let axis = Axis::around(values.iter().copied(), scale, 0.05, 6);
        axis.marks.iter().map(|mark| axis.label(*mark)).collect()
    }

    #[test]
    fn ticks_are_at_round_numbers() {
        assert_eq!(labels(&[0.1, 2.3], Scale::Linear), ["0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(labels(&[0.0, 50_000.0], Scale::Linear), ["0", "10k", "20k", "30k", "40k", "50k"]);
        assert_eq!(labels(&[1.0, 3_000_000.0], Scale::Linear), ["0", "1M", "2M", "3M"]);
        assert_eq!(labels(&[0.0, 4e-5], Scale::Linear), ["0", "1e-5", "2e-5", "3e-5", "4e-5"]);
        assert_eq!(labels(&[-1.0, 1.0], Scale::Linear), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(labels(&[3.0], Scale::Linear), ["2.8", "3.0", "3.2"], "one value has room on both sides");
    }

    #[test]
    fn ticks_of_a_logarithmic_axis_are_at_powers() {
        assert_eq!(labels(&[0.01, 1.0], Scale::Log), ["0.01", "0.1", "1"]);
        assert_eq!(labels(&[0.4, 3.0], Scale::Log), ["0.5", "1", "2"]);
        assert_eq!(labels(&[1.0, 1e12], Scale::Log).len(), 5);
        assert_eq!(labels(&[2.1, 2.4], Scale::Log), ["2.1", "2.2", "2.3", "2.4"]);
        assert_eq!(labels(&[1e-7, 1e-4], Scale::Log), ["1e-7", "1e-6", "1e-5", "1e-4"]);
    }

    proptest! {
        #[test]
        fn there_are_always_some_ticks_and_never_many(low in -1e6..1e6_f64, size in 1e-3..1e6_f64, is_log: bool) {
            let scale = if is_log { Scale::Log } else { Scale::Linear };
            let low = if is_log { low.abs() + 1e-3 } else { low };
            let axis = Axis::around([low, low + size].into_iter(), scale, 0.05, 6);
            prop_assert!((1..=7).contains(&axis.marks.len()), "{axis:?}");
            prop_assert!(axis.marks.iter().all(|mark| axis.range.contains(mark)), "{axis:?}");
            prop_assert!(axis.marks.is_sorted());
        }
    }
}
