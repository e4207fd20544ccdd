//! The loss scale of fp16, and its state in checkpoints.

use drumline_torch::{LossScaler, ScalePolicy, ScalerState, TorchError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Device;

use crate::trainer::Precision;

/// The scaler for a precision; `None` if it needs none.
pub(crate) fn scaler_for(
    precision: Precision,
    policy: ScalePolicy,
    device: Device,
) -> Result<Option<LossScaler>, TorchError> {
    match precision {
        Precision::Fp16 => LossScaler::new(policy, device).map(Some),
        _ => Ok(None),
    }
}

/// The state of loss scaling in a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedScale {
    /// `None` without loss scaling.
    #[serde(default)]
    scale: Option<f64>,
    #[serde(default)]
    growth_tracker: i64,
    #[serde(default)]
    hysteresis: i64,
    /// Steps that were skipped because gradients had overflowed.
    #[serde(default)]
    pub(crate) skipped: u64,
}

impl SavedScale {
    pub(crate) fn new(scaler: Option<&LossScaler>, skipped: u64) -> Result<Self, TorchError> {
        let Some(scaler) = scaler else { return Ok(Self { skipped, ..Self::default() }) };
        let ScalerState { scale, growth_tracker, hysteresis } = scaler.state()?;
        Ok(Self { scale: Some(scale), growth_tracker, hysteresis, skipped })
    }

    /// Reads the saved state. Older checkpoints have none.
    pub(crate) fn of(saved: &Value) -> Result<Self, serde_json::Error> {
        match saved {
            Value::Null => Ok(Self::default()),
            saved => Self::deserialize(saved),
        }
    }

    /// The value to save; null without loss scaling.
    pub(crate) fn to_value(&self) -> Result<Value, serde_json::Error> {
        if *self == Self::default() { Ok(Value::Null) } else { serde_json::to_value(self) }
    }

    /// Loads the scale into the scaler. A training that had another precision before begins with the scaler's initial
    /// scale.
    pub(crate) fn load_into(&self, scaler: Option<&mut LossScaler>) -> Result<(), TorchError> {
        let (Some(scaler), Some(scale)) = (scaler, self.scale) else { return Ok(()) };
        let Self { growth_tracker, hysteresis, .. } = *self;
        scaler.load_state(&ScalerState { scale, growth_tracker, hysteresis })
    }
}
