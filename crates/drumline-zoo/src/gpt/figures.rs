//! The loss per token, and the metrics: perplexity, tokens per second.

use std::cell::Cell;
use std::time::Instant;

use drumline::data::Cause;
use drumline::engine::context::ContextParallel;
use drumline::trainer::{BatchMetric, Loss};
use tch::Tensor;

use crate::models::gpt::SummedLoss;

/// Input tokens, and the tokens that follow them.
type Windows = (Tensor, Tensor);

/// The targets of which this rank has the losses: all, unless ranks along `cp` have parts of the texts.
fn num_tokens(cp: &ContextParallel, windows: &Windows) -> f64 {
    let size = windows.1.size();
    (size[0] * cp.cut(size[1]).len_of(cp.rank())) as f64
}

/// The mean over tokens of the loss that the model has summed.
#[derive(Debug, Clone, Default)]
pub struct PerToken {
    cp: ContextParallel,
}

impl PerToken {
    /// Of a model whose texts are cut among these ranks.
    pub fn on(cp: &ContextParallel) -> Self {
        Self { cp: cp.clone() }
    }
}

impl Loss<Windows, SummedLoss> for PerToken {
    fn sum(&self, output: &SummedLoss, _: &Windows) -> Result<Tensor, Cause> {
        Ok(output.0.shallow_clone())
    }

    fn count(&self, batch: &Windows) -> Result<f64, Cause> {
        Ok(num_tokens(&self.cp, batch))
    }
}

/// The exponential of the mean loss: the number of equally likely tokens that has the same loss.
#[derive(Debug, Clone, Default)]
pub struct Perplexity {
    loss: f64,
    tokens: f64,
    cp: ContextParallel,
}

impl Perplexity {
    /// Of a model whose texts are cut among these ranks.
    pub fn on(cp: &ContextParallel) -> Self {
        Self { cp: cp.clone(), ..Self::default() }
    }
}

impl BatchMetric<Windows, SummedLoss> for Perplexity {
    fn update(&mut self, output: &SummedLoss, batch: &Windows) -> Result<(), Cause> {
        self.loss += output.0.f_double_value(&[])?;
        self.tokens += num_tokens(&self.cp, batch);
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        vec![self.loss, self.tokens]
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        (sums[0] / sums[1]).exp()
    }

    fn reset(&mut self) {
        *self = Self::on(&self.cp);
    }
}

/// Tokens of a step over all ranks, divided by the time since the previous step.
#[derive(Debug, Clone)]
pub struct TokensPerSecond {
    tokens: f64,
    last: Cell<Instant>,
    cp: ContextParallel,
}

impl TokensPerSecond {
    /// Of a model whose texts are cut among these ranks.
    pub fn on(cp: &ContextParallel) -> Self {
        Self { cp: cp.clone(), ..Self::default() }
    }
}

impl Default for TokensPerSecond {
    fn default() -> Self {
        Self { tokens: 0.0, last: Cell::new(Instant::now()), cp: ContextParallel::alone() }
    }
}

impl BatchMetric<Windows, SummedLoss> for TokensPerSecond {
    fn update(&mut self, _: &SummedLoss, batch: &Windows) -> Result<(), Cause> {
        self.tokens += num_tokens(&self.cp, batch);
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
            assert_eq!(PerToken::default().count(&windows(len)).unwrap(), len as f64);
        }
        assert_eq!(perplexity.value_of(&perplexity.sums()), 1f64.exp());
        perplexity.reset();
        assert_eq!(perplexity.sums(), [0.0, 0.0]);
    }
}
