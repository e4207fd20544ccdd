//! `PRECISION`: in which numbers a training computes, and keeps its weights.

use drumline::trainer::{Batch, DistTrainer, Model, Precision};
use drumline::{Optimizer, ParameterGroups};
use drumline_torch::{MasterWeights, TorchError, parameters, weights_in};
use tch::Kind;
use tch::nn::VarStore;

use crate::config::PrecisionKind;

impl PrecisionKind {
    fn of_forward(self) -> Precision {
        match self {
            Self::Fp32 => Precision::F32,
            Self::Bf16 | Self::Bf16Master => Precision::Bf16,
            Self::Fp16 => Precision::Fp16,
        }
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
