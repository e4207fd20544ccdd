//! The callbacks that are supplied.
//!
//! | on all ranks | |
//! |---|---|
//! | [`Warmup`], [`LearningRate`] | the learning rate of each step |
//! | [`GradientClip`] | gradients within bounds |
//! | [`EarlyStop`], [`TimeLimit`] | an end before the last epoch |
//! | [`StopOnNan`] | an error before a broken loss reaches the weights |
//! | [`Checkpoint`], [`EvaluateEvery`] | when to save and to evaluate |

mod checkpoint;
mod clip;
mod evaluate_every;
mod learning_rate;
mod lines;
mod stopping;
mod warmup;

pub use checkpoint::Checkpoint;
pub use clip::GradientClip;
pub use evaluate_every::EvaluateEvery;
pub use learning_rate::LearningRate;
pub(super) use lines::Lines;
pub use stopping::{EarlyStop, StopOnNan, TimeLimit};
pub use warmup::Warmup;
