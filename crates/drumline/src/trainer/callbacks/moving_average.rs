//! A moving average of the weights, which is evaluated and saved as the model.
//!
//! ```text
//!   step ─▶ trained weights ─▶ average += (trained − average) · alpha        alpha = 1 / (steps + 1), or fixed
//!             │  trains on        │  evaluated; `model.safetensors` of checkpoints
//! ```

use drumline_torch::{Named, TorchError};
use serde_json::Value;

use crate::data::loader::Cause;
use crate::trainer::callback::{Callback, CallbackResult};
use crate::trainer::state::TrainState;

/// Keeps a moving average of all trained weights, like NJUNMT's `moving_average_method`. Evaluations and checkpoints
/// use the average; training continues with the weights themselves. Buffers, such as the means of norms, are not
/// averaged.
///
/// The average begins with the initial weights of the training.
///
/// ```
/// use drumline::trainer::MovingAverage;
///
/// let of_all_steps = MovingAverage::sma();
/// let of_the_last = MovingAverage::ema(0.001); // each step has a weight of 0.001
/// # let _ = (of_all_steps, of_the_last);
/// ```
#[derive(Debug)]
pub struct MovingAverage {
    method: Method,
    first_epoch: u64,
    /// The number of values in the average.
    count: u64,
    average: Option<Vec<Named>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Method {
    Simple,
    Exponential { alpha: f64 },
}

impl MovingAverage {
    /// The mean over all steps (`sma`).
    pub fn sma() -> Self {
        Self::by(Method::Simple)
    }

    /// `average += (weights − average) · alpha` at each step (`ema`), with `alpha` between 0 and 1.
    pub fn ema(alpha: f64) -> Self {
        Self::by(Method::Exponential { alpha })
    }

    fn by(method: Method) -> Self {
        Self { method, first_epoch: 0, count: 1, average: None }
    }

    /// The number of epochs before it begins (`moving_average_start_epoch`). Until then the average equals the weights.
    #[must_use]
    pub fn from_epoch(self, first_epoch: u64) -> Self {
        Self { first_epoch, ..self }
    }

    fn add(&mut self, weights: &[Named], epoch: u64) -> Result<(), Cause> {
        self.count = if epoch < self.first_epoch { 1 } else { self.count + 1 };
        let alpha = match self.method {
            _ if epoch < self.first_epoch => 1.0,
            Method::Simple => 1.0 / self.count as f64,
            Method::Exponential { alpha } => alpha,
        };
        for (average, weight) in self.average.iter_mut().flatten().zip(weights) {
            let added = tch::no_grad(|| average.tensor.f_lerp_(&weight.tensor, alpha).map(drop));
            added.map_err(TorchError::from)?;
        }
        Ok(())
    }
}

/// Copies the current values of `weights`, or the values that `saved` has for them.
fn copies(weights: &[Named], saved: Option<&[Named]>) -> Result<Vec<Named>, Cause> {
    let copy = |Named { name, tensor }: &Named| {
        let from = match saved {
            None => tensor,
            Some(saved) => {
                let found = saved.iter().find(|saved| saved.name == *name);
                let found = found.filter(|found| found.tensor.size() == tensor.size());
                &found.ok_or_else(|| format!("the checkpoint's average has no `{name}` of this size"))?.tensor
            }
        };
        let from = from.detach().f_to_device(tensor.device()).map_err(TorchError::from)?;
        Ok(Named { name: name.clone(), tensor: from.copy() })
    };
    weights.iter().map(copy).collect()
}

impl Callback for MovingAverage {
    fn on_train_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        if let Method::Exponential { alpha } = self.method
            && !(alpha > 0.0 && alpha < 1.0)
        {
            return Err(format!("alpha is {alpha}, expected a number between 0 and 1; try 0.001").into());
        }
        self.average = Some(copies(state.parameters(), self.average.as_deref())?);
        Ok(())
    }

    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        self.add(state.parameters(), state.epoch())
    }

    fn evaluation_weights(&self) -> Option<&[Named]> {
        self.average.as_deref()
    }

    fn load_evaluation_weights(&mut self, weights: &[Named]) -> CallbackResult {
        self.average = Some(weights.to_vec());
        Ok(())
    }

    fn state(&self) -> Value {
        self.count.into()
    }

    fn load_state(&mut self, state: &Value) -> CallbackResult {
        self.count = state.as_u64().ok_or_else(|| format!("expected a count of steps, got {state}"))?;
        Ok(())
    }
}
