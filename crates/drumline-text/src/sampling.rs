//! Sampling: chooses the next token from a model's logits.
//!
//! ```text
//!   logits ─▶ the `top_k` highest ─▶ ÷ temperature, softmax ─▶ the likeliest with a total probability of `top_p` ─▶ sample
//! ```

use crate::random::Random;
use crate::{SamplingError, TextError};

/// How tokens are sampled. The default samples from the softmax of all logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Above 1 unlikely tokens become likelier, below 1 less likely. 0 always takes the likeliest (greedy).
    pub temperature: f64,
    /// Samples only from this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Samples only from the likeliest tokens that have this probability together.
    pub top_p: Option<f64>,
    /// The seed of the sampling.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

impl SamplingOptions {
    fn check(&self) -> Result<(), SamplingError> {
        let Self { temperature, top_k, top_p, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(SamplingError::Temperature(temperature));
        }
        if top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        match top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => Err(SamplingError::TopP(p)),
            _ => Ok(()),
        }
    }
}

/// Samples one token after another.
///
/// ```
/// use drumline_text::{SamplingOptions, TokenSampler};
///
/// let mut greedy = TokenSampler::new(SamplingOptions { temperature: 0.0, ..Default::default() })?;
/// assert_eq!(greedy.pick(&[0.5, 2.0, -1.0]), 1);
/// # Ok::<(), drumline_text::TextError>(())
/// ```
pub struct TokenSampler {
    options: SamplingOptions,
    random: Random,
}

impl TokenSampler {
    /// A sampler with these options. Options that are out of range are an error.
    pub fn new(options: SamplingOptions) -> Result<Self, TextError> {
        options.check()?;
        Ok(Self { options, random: Random::new(options.seed, 0) })
    }

    /// The next token: an index into `logits`.
    ///
    /// # Panics
    ///
    /// If `logits` is empty.
    pub fn pick(&mut self, logits: &[f32]) -> usize {
        let SamplingOptions { temperature, top_k, top_p, .. } = self.options;
        let mut tokens: Vec<usize> = (0..logits.len()).collect();
        // Equal logits are ordered by token, so that the result does not depend on the sorting algorithm.
        let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let kept = if temperature == 0.0 { 1 } else { top_k.unwrap_or(usize::MAX).min(logits.len()) };
        if kept < logits.len() {
            tokens.select_nth_unstable_by(kept - 1, likelier);
            tokens.truncate(kept);
        }
        tokens.sort_unstable_by(likelier);
        if kept == 1 {
            return tokens[0];
        }
        let highest = f64::from(logits[tokens[0]]);
        let weights: Vec<f64> =
            tokens.iter().map(|token| ((f64::from(logits[*token]) - highest) / temperature).exp()).collect();
        let kept = nucleus(&weights, top_p.unwrap_or(1.0));
        let mut left = self.random.uniform() * weights[..kept].iter().sum::<f64>();
        for (token, weight) in tokens.iter().zip(&weights[..kept]) {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        tokens[kept - 1]
    }
}

/// The number of weights, taken from the front, whose sum is at least this fraction of the total. The weights are in descending
/// order.
fn nucleus(weights: &[f64], fraction: f64) -> usize {
    let enough = fraction * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let needed = weights.iter().take_while(|weight| {
        let is_needed = sum < enough;
        sum += **weight;
        is_needed
    });
    needed.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each token is sampled, in a thousand samples.
    fn sampled(options: SamplingOptions, logits: &[f32]) -> Vec<usize> {
        let mut sampler = TokenSampler::new(options).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..1000).for_each(|_| counts[sampler.pick(logits)] += 1);
        counts
    }

    #[test]
    fn tokens_are_sampled_with_their_probabilities() {
        let logits = [0.1f64, 0.4, 0.2, 0.3].map(|p| p.ln() as f32);
        let plain = SamplingOptions::default();
        let near = |counts: &[usize], expected: &[f64]| {
            let is_near = |(count, p): (&usize, &f64)| (*count as f64 / 1000.0 - p).abs() < 0.05;
            assert!(counts.iter().zip(expected).all(is_near), "{counts:?}");
        };
        near(&sampled(plain, &logits), &[0.1, 0.4, 0.2, 0.3]);
        near(
            &sampled(SamplingOptions { top_k: Some(2), ..plain }, &logits),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        let most = SamplingOptions { top_p: Some(0.65), ..plain };
        near(&sampled(most, &logits), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        near(&sampled(SamplingOptions { top_p: Some(0.1), ..plain }, &logits), &[0.0, 1.0, 0.0, 0.0]);
        let squares: Vec<f64> = [0.01, 0.16, 0.04, 0.09].iter().map(|p| p / 0.3).collect();
        near(&sampled(SamplingOptions { temperature: 0.5, ..plain }, &logits), &squares);
        assert_eq!(sampled(SamplingOptions { temperature: 0.0, ..plain }, &logits), [0, 1000, 0, 0]);
        assert_eq!(
            sampled(SamplingOptions { top_k: Some(1), ..plain }, &[1.0, 1.0]),
            [1000, 0],
            "the first of equals"
        );
    }

    #[test]
    fn samples_depend_on_the_seed() {
        let logits = [0.0; 50];
        let series = |seed| {
            let mut sampler = TokenSampler::new(SamplingOptions { seed, ..Default::default() }).unwrap();
            (0..20).map(|_| sampler.pick(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(series(3), series(3));
        assert_ne!(series(3), series(4));
    }

    #[test]
    fn options_out_of_range_are_an_error() {
        let plain = SamplingOptions::default();
        for (options, expected) in [
            (SamplingOptions { temperature: -1.0, ..plain }, "the temperature is -1; try 0 or more"),
            (SamplingOptions { top_k: Some(0), ..plain }, "top-k is 0"),
            (SamplingOptions { top_p: Some(1.5), ..plain }, "top-p is 1.5; try more than 0"),
        ] {
            assert!(TokenSampler::new(options).err().unwrap().to_string().contains(expected));
        }
    }
}
