//! The callbacks that are supplied.
//!
//! | on all ranks | |
//! |---|---|
//! | [`Warmup`], [`LearningRate`] | the learning rate of each step |
//! | [`ReduceOnPlateau`] | the learning rate after each evaluation |
//! | [`MovingAverage`] | averaged weights, to evaluate and to save |
//! | [`GradientClip`] | gradients within bounds |
//! | [`EarlyStop`], [`TimeLimit`] | an end before the last epoch |
//! | [`Checkpoint`], [`EvaluateEvery`] | when to save and to evaluate |
//! | [`RankFiles`] | what each rank is doing, for `drumline watch` |
//!
//! | on the master | |
//! |---|---|
//! | [`EventFile`] | `metrics.jsonl`, for programs |
//! | [`TensorBoard`] | curves, gradients and settings for TensorBoard |
//! | [`Plots`] | the curves as a picture |

mod checkpoint;
mod clip;
mod evaluate_every;
mod event_file;
mod learning_rate;
mod moving_average;
mod plots;
mod rank_files;
mod reduce_on_plateau;
mod shown;
mod stopping;
mod tensorboard;
mod warmup;

pub use checkpoint::Checkpoint;
pub use clip::GradientClip;
pub use evaluate_every::EvaluateEvery;
pub use event_file::EventFile;
pub use learning_rate::LearningRate;
pub use moving_average::MovingAverage;
pub use plots::Plots;
pub use rank_files::RankFiles;
pub use reduce_on_plateau::ReduceOnPlateau;
pub(super) use shown::Shown;
pub use stopping::{EarlyStop, TimeLimit};
pub use tensorboard::TensorBoard;
pub use warmup::Warmup;
