//! The distribution of values, in buckets that grow by a tenth from one to the next on both sides of zero: fine near zero, where
//! gradients are, and wide enough for any `f32`.
//!
//! ```text
//!   …, -1.21e-12, -1.1e-12, -1e-12, 0, 1e-12, 1.1e-12, 1.21e-12, …       ends of buckets
//! ```

use super::message::Histogram;

/// The end of the first bucket above zero.
const SMALLEST: f64 = 1e-12;
const GROWTH: f64 = 1.1;
/// Buckets of one side: the last one ends beyond the largest `f32`.
const SIDE: usize = 1224;

/// The distribution of the finite values; `None` if there are none.
pub(super) fn of(values: &[f32]) -> Option<Histogram> {
    let mut counts = vec![0_u64; 2 * SIDE + 1];
    let mut spread = Histogram { min: f64::INFINITY, max: f64::NEG_INFINITY, ..Histogram::default() };
    for value in values.iter().filter(|value| value.is_finite()).map(|value| f64::from(*value)) {
        counts[bucket_of(value)] += 1;
        spread.min = spread.min.min(value);
        spread.max = spread.max.max(value);
        spread.num += 1.0;
        spread.sum += value;
        spread.sum_squares += value * value;
    }
    let first = counts.iter().position(|count| *count > 0)?;
    let last = counts.iter().rposition(|count| *count > 0)?;
    // TensorBoard draws from the end of the bucket before the first.
    let shown = first.saturating_sub(1)..=last;
    spread.limits = shown.clone().map(end_of).collect();
    spread.counts = shown.map(|bucket| counts[bucket] as f64).collect();
    Some(spread)
}

/// A bucket contains values up to its end; the middle one contains zero, and values too small to distinguish from it.
fn bucket_of(value: f64) -> usize {
    let size = value.abs();
    if size < SMALLEST {
        return SIDE;
    }
    let steps = ((size / SMALLEST).ln() / GROWTH.ln()) as usize;
    if value > 0.0 { SIDE + 1 + steps.min(SIDE - 1) } else { SIDE - 1 - steps.min(SIDE - 1) }
}

/// Where a bucket ends, towards larger numbers.
fn end_of(bucket: usize) -> f64 {
    let end = |steps: usize| SMALLEST * GROWTH.powi(steps as i32);
    match bucket.checked_sub(SIDE) {
        Some(steps) => end(steps),
        None => -end(SIDE - 1 - bucket),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_value_is_within_its_bucket(value in proptest::num::f32::NORMAL | proptest::num::f32::ZERO) {
            let value = f64::from(value);
            let bucket = bucket_of(value);
            // Half of a thousandth for the rounding of logarithms.
            let slack = value.abs() * 5e-4;
            prop_assert!(value <= end_of(bucket) + slack, "{value} in {bucket}");
            prop_assert!(bucket == 0 || value >= end_of(bucket - 1) - slack, "{value} in {bucket}");
        }

        #[test]
        fn every_number_is_counted_once(values in proptest::collection::vec(proptest::num::f32::ANY, 0..200)) {
            let numbers: Vec<f32> = values.iter().copied().filter(|value| value.is_finite()).collect();
            let spread = of(&values);
            prop_assert_eq!(spread.is_some(), !numbers.is_empty());
            let counted: f64 = spread.iter().flat_map(|spread| &spread.counts).sum();
            prop_assert_eq!(counted, numbers.len() as f64);
        }
    }

    #[test]
    fn figures_are_those_of_the_values() {
        let spread = of(&[-1.0, 0.5, 2.0, f32::NAN]).unwrap();
        assert_eq!((spread.min, spread.max, spread.num), (-1.0, 2.0, 3.0));
        assert_eq!((spread.sum, spread.sum_squares), (1.5, 5.25));
        assert_eq!(spread.limits.len(), spread.counts.len());
        assert!(spread.limits.is_sorted());
        assert!(end_of(2 * SIDE) > f64::from(f32::MAX) && end_of(0) < -f64::from(f32::MAX) / 1.2);
    }
}
