//! The loss scale of a training in fp16: made where it is needed, saved with a checkpoint, and gone on from.

use drumline_torch::{LossScaler, ScalePolicy, ScalerState, TorchError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Device;

use crate::trainer::Precision;

/// The scaler that a precision needs; `None` where gradients are not lost without.
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

/// What a checkpoint keeps of loss scaling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeptScale {
    /// `None` if nothing was scaled.
    #[serde(default)]
    scale: Option<f64>,
    #[serde(default)]
    growth_tracker: i64,
    #[serde(default)]
    hysteresis: i64,
    /// Steps that were left out because gradients had overflowed.
    #[serde(default)]
    pub(crate) skipped: u64,
}

impl KeptScale {
    pub(crate) fn new(scaler: Option<&LossScaler>, skipped: u64) -> Result<Self, TorchError> {
        let Some(scaler) = scaler else { return Ok(Self { skipped, ..Self::default() }) };
        let ScalerState { scale, growth_tracker, hysteresis } = scaler.state()?;
        Ok(Self { scale: Some(scale), growth_tracker, hysteresis, skipped })
    }

    /// What was saved; a checkpoint of before there were scalers has nothing.
    pub(crate) fn of(saved: &Value) -> Result<Self, serde_json::Error> {
        match saved {
            Value::Null => Ok(Self::default()),
            saved => Self::deserialize(saved),
        }
    }

    /// Nothing is written where nothing was scaled.
    pub(crate) fn to_value(&self) -> Result<Value, serde_json::Error> {
        if *self == Self::default() { Ok(Value::Null) } else { serde_json::to_value(self) }
    }

    /// The scale becomes the scaler's. A training that was in another precision before begins with a scale of its own.
    pub(crate) fn load_into(&self, scaler: Option<&mut LossScaler>) -> Result<(), TorchError> {
        let (Some(scaler), Some(scale)) = (scaler, self.scale) else { return Ok(()) };
        let Self { growth_tracker, hysteresis, .. } = *self;
        scaler.load_state(&ScalerState { scale, growth_tracker, hysteresis })
    }
}
