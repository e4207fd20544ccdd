//! Mean and variance of a batch that is split over several ranks: plain arithmetic in double precision.
//!
//! A rank's **statistics** are the number of its values per channel, and for each channel their mean and (biased)
//! variance. Parts are combined through their means, which does not lose precision as sums of squares would.

/// Mean and variance of all values of a channel, for each channel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Moments {
    /// The number of values per channel on all ranks.
    pub(super) count: f64,
    pub(super) mean: Vec<f64>,
    /// The mean square distance from the mean.
    pub(super) variance: Vec<f64>,
}

/// One rank's statistics.
struct Part<'a> {
    count: f64,
    mean: &'a [f64],
    variance: &'a [f64],
}

impl<'a> Part<'a> {
    fn of(statistics: &'a [f64], channels: usize) -> Self {
        let (mean, variance) = statistics[1..].split_at(channels);
        Self { count: statistics[0], mean, variance }
    }
}

impl Moments {
    /// The moments of all ranks' statistics, which are concatenated: `[count, means…, variances…]` for each rank.
    pub(super) fn of_all(statistics: &[f64], channels: usize) -> Self {
        let parts: Vec<Part<'_>> =
            statistics.chunks(1 + 2 * channels).map(|part| Part::of(part, channels)).collect();
        let count: f64 = parts.iter().map(|part| part.count).sum();
        let weighted = |value: &dyn Fn(&Part<'_>) -> f64| {
            parts.iter().map(|part| part.count * value(part)).sum::<f64>() / count
        };
        let mean: Vec<f64> = (0..channels).map(|c| weighted(&|part| part.mean[c])).collect();
        let spread = |c: usize| weighted(&|part| part.variance[c] + (part.mean[c] - mean[c]).powi(2));
        Self { count, variance: (0..channels).map(spread).collect(), mean }
    }

    /// One over the standard deviation.
    pub(super) fn invstd(&self, eps: f64) -> Vec<f64> {
        self.variance.iter().map(|variance| 1.0 / (variance + eps).sqrt()).collect()
    }

    /// The unbiased estimate of the variance.
    pub(super) fn unbiased_variance(&self) -> Vec<f64> {
        self.variance.iter().map(|variance| variance * self.count / (self.count - 1.0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(values: &[f64]) -> [f64; 3] {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        [count, mean, values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count.max(1.0)]
    }

    #[test]
    fn combined_parts_equal_the_whole() {
        let values = [1.0, 4.0, -2.5, 8.0, 0.25, 3.0, 3.0];
        let [count, mean, variance] = statistics(&values);
        for cuts in [[0, 0], [1, 1], [2, 5], [0, 7], [3, 7]] {
            let parts = [&values[..cuts[0]], &values[cuts[0]..cuts[1]], &values[cuts[1]..]];
            let all: Vec<f64> = parts.iter().flat_map(|part| statistics(part)).collect();
            let got = Moments::of_all(&all, 1);
            assert_eq!(got.count, count);
            assert!((got.mean[0] - mean).abs() < 1e-12 && (got.variance[0] - variance).abs() < 1e-12);
        }
    }

    #[test]
    fn a_large_mean_does_not_change_the_variance() {
        let parts: Vec<f64> =
            [[1e8, 1e8 + 1.0], [1e8 + 2.0, 1e8 + 3.0]].iter().flat_map(|p| statistics(p)).collect();
        assert_eq!(Moments::of_all(&parts, 1).variance, [1.25]);
    }
}
