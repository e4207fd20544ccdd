//! `PRECISION`: in which numbers a training computes, and keeps its weights.

use drumline::trainer::{Batch, DistTrainer, Model, Precision};
use drumline::{Optimizer, ParameterGroups};
use drumline_torch::{Autocast, MasterWeights, TorchError, parameters, weights_in};
use tch::nn::VarStore;
use tch::{Device, Kind};

use crate::config::PrecisionKind;

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

    /// The trainer in this precision, with an optimizer of all parameters of `store`; once these have their first values.
    pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch, O: Optimizer + 'static>(
        self,
        trainer: DistTrainer<'a, M, B>,
        store: &VarStore,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<DistTrainer<'a, M, B>, TorchError> {
        let trainer = trainer.precision(self.of_forward());
        if self != Self::Bf16Master {
            return Ok(trainer.optimizer(make(parameters(store).into())?));
        }
        weights_in(&parameters(store), Kind::BFloat16)?;
        Ok(trainer.optimizer(MasterWeights::new(parameters(store), make)?))
    }
}
