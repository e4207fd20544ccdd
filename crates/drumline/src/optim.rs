//! Optimizers, the parameters that they step, loss scaling and clipping.
//!
//! - [`Sgd`], [`Adam`], [`AdamW`] over [`parameters`] or [`ParameterGroups`], with PyTorch's results
//! - [`Lion`], [`Adafactor`], Adam with smaller [`Moments`]: less memory; [`Lamb`]: large batches
//! - [`LossScaler`], [`MasterWeights`]: training in fp16 and bf16
//! - [`clip_grad_norm`], [`clip_grad_value`]
//! - [`DistributedOptimizer`]: as in Horovod; [`PeriodicAverager`]: averages weights now and then instead of gradients

pub use drumline_parallel::{
    AveragingLevel, DistributedOptimizer, HierarchicalAverager, PeriodicAverager, broadcast_optimizer_state,
};
pub use drumline_torch::{
    Adafactor, AdafactorOptions, Adagrad, AdagradOptions, Adam, AdamOptions, AdamW, BiasCorrection,
    DeepSpeedScale, DynamicScale, Lamb, LambOptions, Lion, LionOptions, LossScaler, MasterKind,
    MasterWeights, Moments, Named, NormType, Optimizer, OptimizerState, ParameterGroup, ParameterGroups,
    ScalePolicy, ScaledGrads, ScalerState, Sgd, SgdOptions, StepMade, StepSize, Unscaled, buffers,
    clip_grad_norm, clip_grad_value, no_decay_on_norms, parameters, weights_in,
};
