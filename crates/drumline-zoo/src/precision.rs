//! `PRECISION` and `FP16`: the precision of computations and weights, and the loss scale.

use drumline::optim::{Optimizer, ParameterGroups, ScalePolicy};
use drumline::trainer::{self, Batch, DistTrainer, Model};
use drumline_torch::{
    Autocast, MasterKind, MasterWeights, Named, TorchError, is_weight, parameters, weights_in,
};
use tch::nn::VarStore;
use tch::{Device, Kind};

use crate::config::{Fp16, PrecisionKind};
use crate::first_weights::FirstWeights;

impl PrecisionKind {
    fn of_forward(self) -> trainer::Precision {
        match self {
            Self::Fp32 => trainer::Precision::F32,
            Self::Bf16 | Self::Bf16Master => trainer::Precision::Bf16,
            Self::Fp16 => trainer::Precision::Fp16,
        }
    }

    /// An autocast guard for a forward pass outside the trainer, which is needed if the weights have fewer bits than
    /// the inputs.
    pub(crate) fn autocast_of_weights(self, device: Device) -> Result<Option<Autocast>, TorchError> {
        let is_needed = self == Self::Bf16Master;
        is_needed.then(|| Autocast::new(device, Kind::BFloat16)).transpose()
    }
}

/// The precision of a training run, with its loss scale.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Precision {
    kind: PrecisionKind,
    /// The loss scale in fp16.
    loss_scale: ScalePolicy,
}

impl Precision {
    pub(crate) fn new(kind: PrecisionKind, fp16: &Fp16) -> Self {
        Self { kind, loss_scale: fp16.policy() }
    }

    /// Converts the weights to the data type in which this precision stores them.
    pub(crate) fn convert_weights(self, store: &VarStore) -> Result<(), TorchError> {
        if self.kind != PrecisionKind::Bf16Master {
            return Ok(());
        }
        let (parameters, kind) = (parameters(store), Kind::BFloat16);
        if FirstWeights::of_this_build().have_values() {
            return weights_in(&parameters, kind);
        }
        parameters.iter().filter(|named| is_weight(&named.tensor)).try_for_each(|Named { tensor, .. }| {
            let options = (kind, tensor.device());
            let untouched = tensor.f_new_empty_strided(tensor.size(), tensor.stride(), options)?;
            Ok(tensor.shallow_clone().f_set_data(&untouched)?)
        })
    }

    /// Sets the precision of the trainer.
    pub(crate) fn set<'a, M: Model<B> + ?Sized, B: Batch>(
        self,
        trainer: DistTrainer<'a, M, B>,
    ) -> DistTrainer<'a, M, B> {
        trainer.precision(self.kind.of_forward()).loss_scale(self.loss_scale)
    }

    /// Sets the precision of the trainer, and an optimizer for all parameters of `store`. The parameters must have
    /// their initial values.
    pub(crate) fn with_optimizer<'a, M: Model<B> + ?Sized, B: Batch, O: Optimizer + 'static>(
        self,
        trainer: DistTrainer<'a, M, B>,
        store: &VarStore,
        master: MasterKind,
        make: impl FnOnce(ParameterGroups) -> Result<O, TorchError>,
    ) -> Result<DistTrainer<'a, M, B>, TorchError> {
        let trainer = self.set(trainer);
        if self.kind != PrecisionKind::Bf16Master {
            return Ok(trainer.optimizer(make(parameters(store).into())?));
        }
        self.convert_weights(store)?;
        Ok(trainer.optimizer(MasterWeights::with_kind(master, parameters(store), make)?))
    }
}
