//! The built-in callbacks.
//!
//! | on all ranks | |
//! |---|---|
//! | [`MovingAverage`] | averages weights, for evaluations and checkpoints |
//! | [`EarlyStop`], [`TimeLimit`] | end the training before the last epoch |
//! | [`Checkpoint`], [`EvaluateEvery`] | save and evaluate at intervals |
//! | [`RankFiles`] | write the status of each rank, for `drumline watch` |
//!
//! | on rank 0 | |
//! |---|---|
//! | [`EventFile`] | writes `metrics.jsonl` |
//! | [`CsvFiles`] | writes loss and learning rate as CSV |
//! | [`TensorBoard`] | writes curves, gradients and settings for TensorBoard |
//! | [`Plots`] | draws the curves |

mod checkpoint;
mod csv_files;
mod evaluate_every;
mod event_file;
mod moving_average;
mod plots;
mod progress_display;
mod rank_files;
mod stopping;
mod tensorboard;

pub use checkpoint::Checkpoint;
pub use csv_files::CsvFiles;
pub use evaluate_every::EvaluateEvery;
pub use event_file::EventFile;
pub use moving_average::MovingAverage;
pub use plots::Plots;
pub(super) use progress_display::ProgressDisplay;
pub use rank_files::RankFiles;
pub use stopping::{EarlyStop, TimeLimit};
pub use tensorboard::TensorBoard;
