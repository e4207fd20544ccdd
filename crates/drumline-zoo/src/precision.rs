//! `PRECISION` and `FP16`: in which numbers a training computes and keeps its weights, and how its loss is scaled.

use drumline::trainer::{Batch, DistTrainer, Model, Precision};
use drumline::{Optimizer, ParameterGroups, ScalePolicy};
use drumline_torch::{Autocast, MasterWeights, TorchError, parameters, weights_in};
use tch::nn::VarStore;
use tch::{Device, Kind};

use crate::config::{Fp16, PrecisionKind};

impl PrecisionKind {
    fn of_forward(self) -> Precision {
        match self {
            Self::Fp32 => Precision::F32,
            Self::Bf16 | Self::Bf16Master => Precision::Bf16,
            Self::Fp16 => Precision::Fp16,
        }
    }

    /// What a forward outside the trainer needs until this is dropped, where the weights themselves have fewer bits than their inputs.
    pub(crate) fn autocast_of_weights(self, device: Device) -> Result<Option<Autocast>, TorchError> {
        let is_needed = self == Self::Bf16Master;
        is_needed.then(|| Autocast::new(device, Kind::BFloat16)).transpose()
    }
}

/// What the keys say of the numbers of a training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers {
    precision: PrecisionKind,
    /// Of fp16.
    loss_scale: ScalePolicy,
}

impl Numbers {
    pub(crate) fn of(precision: PrecisionKind, fp16: &Fp16) -> Self {
        Self { precision, loss_scale: fp16.policy() }
    }

    /// The trainer in these numbers, with an optimizer of all parameters of `store`; once these have their first values.
    pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch, O: Optimizer + 'static>(
        self,
        trainer: DistTrainer<'a, M, B>,
        store: &VarStore,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<DistTrainer<'a, M, B>, TorchError> {
        let trainer = trainer.precision(self.precision.of_forward()).loss_scale(self.loss_scale);
        if self.precision != PrecisionKind::Bf16Master {
            return Ok(trainer.optimizer(make(parameters(store).into())?));
        }
        weights_in(&parameters(store), Kind::BFloat16)?;
        Ok(trainer.optimizer(MasterWeights::new(parameters(store), make)?))
    }
}
