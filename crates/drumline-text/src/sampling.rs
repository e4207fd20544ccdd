//! Which token comes next: the likeliest, or one drawn from a model's logits.
//!
//! ```text
//!   logits ─▶ the `top_k` greatest ─▶ ÷ temperature, softmax ─▶ the likeliest that make up `top_p` together ─▶ draw
//! ```

use crate::TextError;
use crate::random::Random;

/// How tokens are drawn; the default is plain drawing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Above 1 the unlikely gets likelier, below 1 less likely; 0 always takes the likeliest.
    pub temperature: f64,
    /// Only so many of the likeliest tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the likeliest that have this probability together.
    pub top_p: Option<f64>,
    /// Decides what is drawn.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

impl SamplingOptions {
    fn check(&self) -> Result<(), TextError> {
        let Self { temperature, top_k, top_p, .. } = *self;
        let unfit = |what: String| Err(TextError::Sampling { what });
        if !(temperature.is_finite() && temperature >= 0.0) {
            return unfit(format!("the temperature is {temperature}; try 0 or more"));
        }
        if top_k == Some(0) {
            return unfit("top-k is 0; try 1 or more".into());
        }
        match top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => unfit(format!("top-p is {p}; try more than 0, up to 1")),
            _ => Ok(()),
        }
    }
}

/// Draws token after token.
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
    /// Options that make no sense are refused.
    pub fn new(options: SamplingOptions) -> Result<Self, TextError> {
        options.check()?;
        Ok(Self { options, random: Random::new(options.seed, 0) })
    }

    /// The place of the token that comes next.
    ///
    /// # Panics
    ///
    /// Without logits.
    pub fn pick(&mut self, logits: &[f32]) -> usize {
        let SamplingOptions { temperature, top_k, top_p, .. } = self.options;
        let mut places: Vec<usize> = (0..logits.len()).collect();
        // Of equals the first, so that what is drawn does not depend on the sorting.
        let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let kept = if temperature == 0.0 { 1 } else { top_k.unwrap_or(usize::MAX).min(logits.len()) };
        if kept < logits.len() {
            places.select_nth_unstable_by(kept - 1, likelier);
            places.truncate(kept);
        }
        places.sort_unstable_by(likelier);
        if kept == 1 {
            return places[0];
        }
        let greatest = f64::from(logits[places[0]]);
        let weights: Vec<f64> =
            places.iter().map(|place| ((f64::from(logits[*place]) - greatest) / temperature).exp()).collect();
        let kept = nucleus(&weights, top_p.unwrap_or(1.0));
        let mut left = self.random.uniform() * weights[..kept].iter().sum::<f64>();
        for (place, weight) in places.iter().zip(&weights[..kept]) {
            left -= weight;
            if left < 0.0 {
                return *place;
            }
        }
        places[kept - 1]
    }
}

/// How many of the weights, which fall, make up this part of all.
fn nucleus(weights: &[f64], part: f64) -> usize {
    let enough = part * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let before = weights.iter().take_while(|weight| {
        let goes_on = sum < enough;
        sum += **weight;
        goes_on
    });
    before.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each place is drawn, in a thousand.
    fn drawn(options: SamplingOptions, logits: &[f32]) -> Vec<usize> {
        let mut sampler = TokenSampler::new(options).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..1000).for_each(|_| counts[sampler.pick(logits)] += 1);
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_should() {
        let logits = [0.1f64, 0.4, 0.2, 0.3].map(|p| p.ln() as f32);
        let plain = SamplingOptions::default();
        let near = |counts: &[usize], expected: &[f64]| {
            let is_near = |(count, p): (&usize, &f64)| (*count as f64 / 1000.0 - p).abs() < 0.05;
            assert!(counts.iter().zip(expected).all(is_near), "{counts:?}");
        };
        near(&drawn(plain, &logits), &[0.1, 0.4, 0.2, 0.3]);
        near(&drawn(SamplingOptions { top_k: Some(2), ..plain }, &logits), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        let most = SamplingOptions { top_p: Some(0.65), ..plain };
        near(&drawn(most, &logits), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        near(&drawn(SamplingOptions { top_p: Some(0.1), ..plain }, &logits), &[0.0, 1.0, 0.0, 0.0]);
        let squares: Vec<f64> = [0.01, 0.16, 0.04, 0.09].iter().map(|p| p / 0.3).collect();
        near(&drawn(SamplingOptions { temperature: 0.5, ..plain }, &logits), &squares);
        assert_eq!(drawn(SamplingOptions { temperature: 0.0, ..plain }, &logits), [0, 1000, 0, 0]);
        assert_eq!(
            drawn(SamplingOptions { top_k: Some(1), ..plain }, &[1.0, 1.0]),
            [1000, 0],
            "the first of equals"
        );
    }

    #[test]
    fn the_seed_decides() {
        let logits = [0.0; 50];
        let series = |seed| {
            let mut sampler = TokenSampler::new(SamplingOptions { seed, ..Default::default() }).unwrap();
            (0..20).map(|_| sampler.pick(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(series(3), series(3));
        assert_ne!(series(3), series(4));
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let plain = SamplingOptions::default();
        for (options, told) in [
            (SamplingOptions { temperature: -1.0, ..plain }, "the temperature is -1; try 0 or more"),
            (SamplingOptions { top_k: Some(0), ..plain }, "top-k is 0"),
            (SamplingOptions { top_p: Some(1.5), ..plain }, "top-p is 1.5; try more than 0"),
        ] {
            assert!(TokenSampler::new(options).err().unwrap().to_string().contains(told));
        }
    }
}
