//! The loss per token, and the metrics: perplexity, tokens per second.

use std::cell::Cell;
use std::time::Instant;

use drumline::data::Cause;
use drumline::trainer::{BatchMetric, Loss};
use tch::Tensor;

use crate::models::gpt::SummedLoss;

/// Input tokens, and the tokens that follow them.
type Windows = (Tensor, Tensor);

/// The mean over tokens of the loss that the model has summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerToken;

impl Loss<Windows, SummedLoss> for PerToken {
    fn sum(&self, output: &SummedLoss, _: &Windows) -> Result<Tensor, Cause> {
        Ok(output.0.shallow_clone())
    }

    fn count(&self, batch: &Windows) -> Result<f64, Cause> {
        Ok(batch.1.numel() as f64)
    }
}

/// The exponential of the mean loss: the number of equally likely tokens that has the same loss.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Perplexity {
    loss: f64,
    tokens: f64,
}

impl BatchMetric<Windows, SummedLoss> for Perplexity {
    fn update(&mut self, output: &SummedLoss, batch: &Windows) -> Result<(), Cause> {
        self.loss += output.0.f_double_value(&[])?;
        self.tokens += batch.1.numel() as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.loss, self.tokens]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        (sums[0] / sums[1]).exp()
    }

    fn reset(&mut self) {
        *self = Self::default();
    }
}

/// Tokens of a step over all ranks, divided by the time since the previous step.
#[derive(Debug, Clone)]
pub struct TokensPerSecond {
    tokens: f64,
    last: Cell<Instant>,
}

impl Default for TokensPerSecond {
    fn default() -> Self {
        Self { tokens: 0.0, last: Cell::new(Instant::now()) }
    }
}

impl BatchMetric<Windows, SummedLoss> for TokensPerSecond {
    fn update(&mut self, _: &SummedLoss, batch: &Windows) -> Result<(), Cause> {
        self.tokens += batch.1.numel() as f64;
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.tokens]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        let now = Instant::now();
        sums[0] / now.duration_since(self.last.replace(now)).as_secs_f64().max(1e-9)
    }

    fn reset(&mut self) {
        self.tokens = 0.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn perplexity_is_of_all_tokens() {
        let windows = |len| {
            let tokens = Tensor::zeros([1, len], (Kind::Int64, Device::Cpu));
            (tokens.shallow_clone(), tokens)
        };
        let mut perplexity = Perplexity::default();
        for (loss, len) in [(3.0, 1), (1.0, 3)] {
            let output = SummedLoss(Tensor::from(loss));
            perplexity.update(&output, &windows(len)).unwrap();
            assert_eq!(PerToken.count(&windows(len)).unwrap(), len as f64);
        }
        assert_eq!(perplexity.value_of(&perplexity.sums()), 1f64.exp());
        perplexity.reset();
        assert_eq!(perplexity, Perplexity::default());
    }
}
