//! The mean of the last steps, each weighted by its samples.
//!
//! The batch at the end of an epoch is often smaller than the others. Its loss is noisier and its rate lower, so the last
//! step alone is a bad answer to "how is the run?".

use std::collections::VecDeque;

/// The number of steps that count.
const STEPS: usize = 20;

/// The last steps, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    steps: VecDeque<(f64, f64)>,
}

impl Recent {
    /// Adds the value of a step with this many samples; 0, if samples are not counted, counts as one.
    pub(crate) fn push(&mut self, value: f64, samples: f64) {
        if self.steps.len() == STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back((value, if samples > 0.0 { samples } else { 1.0 }));
    }

    /// The mean of values such as losses. `None` if the last value is not a number: that must be visible.
    pub(crate) fn mean(&self) -> Option<f64> {
        self.last()?;
        let numbers = self.numbers();
        let (sum, samples) =
            numbers.fold((0.0, 0.0), |(sum, all), (value, one)| (sum + value * one, all + one));
        Some(sum / samples)
    }

    /// The mean of rates per second, over the time that the steps took.
    pub(crate) fn rate(&self) -> Option<f64> {
        self.last()?;
        let rates = self.numbers().filter(|(rate, _)| *rate > 0.0);
        let (samples, seconds) =
            rates.fold((0.0, 0.0), |(all, time), (rate, one)| (all + one, time + one / rate));
        (seconds > 0.0).then(|| samples / seconds)
    }

    /// The last value, if it is a number.
    pub(crate) fn last(&self) -> Option<f64> {
        self.steps.back().map(|(value, _)| *value).filter(|value| value.is_finite())
    }

    fn numbers(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.steps.iter().copied().filter(|(value, _)| value.is_finite())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(steps: &[(f64, f64)]) -> Recent {
        let mut recent = Recent::default();
        steps.iter().for_each(|(value, samples)| recent.push(*value, *samples));
        recent
    }

    #[test]
    fn a_small_last_batch_counts_by_its_samples() {
        let losses = of(&[(1.0, 32.0), (1.0, 32.0), (9.0, 1.0)]);
        assert!((losses.mean().unwrap() - 73.0 / 65.0).abs() < 1e-12);
        // 64 samples in 2 s, and one that took a tenth of a second.
        let rates = of(&[(32.0, 32.0), (32.0, 32.0), (10.0, 1.0)]);
        assert!((rates.rate().unwrap() - 65.0 / 2.1).abs() < 1e-12);
        assert_eq!(rates.last(), Some(10.0), "control: the last step alone");
    }

    #[test]
    fn only_the_last_steps_count() {
        let mut recent = of(&[(1000.0, 1.0)]);
        (0..STEPS).for_each(|_| recent.push(2.0, 0.0));
        assert_eq!((recent.mean(), recent.rate()), (Some(2.0), Some(2.0)));
    }

    #[test]
    fn a_value_that_is_no_number_is_visible_if_it_is_the_last() {
        assert_eq!(of(&[(1.0, 1.0), (f64::NAN, 1.0)]).mean(), None);
        assert_eq!(of(&[(f64::NAN, 1.0), (1.0, 1.0)]).mean(), Some(1.0));
        assert_eq!((of(&[]).mean(), of(&[]).rate(), of(&[(0.0, 1.0)]).rate()), (None, None, None));
    }
}
