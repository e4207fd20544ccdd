//! Image classification with Distribuuuu's keys: the configuration, the datasets and the task.

pub mod config;
mod data_set;
mod placing;
mod schedule;
mod sets;
mod task;

pub use config::ImageConfig;
pub(crate) use task::{ImageTask, REPORT_STYLE};
