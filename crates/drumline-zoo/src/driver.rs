//! The driver of all tasks: train, test, check and parity.
//!
//! ```text
//!   train   load ─▶ new, open ─▶ join, agree ─▶ find checkpoint ─▶ meet ─▶ model, data ─▶ DistTrainer::train ─▶ report
//!   test    load ─▶ new, open ─▶ join, agree ─▶ meet ─▶ model, data ─▶ DistTrainer::evaluate ─▶ report
//!   parity  load ─▶ new, open ─▶ join, agree ─▶ meet ─▶ twice: model, data ─▶ DistTrainer::train ─▶ compare
//! ```
//! The driver knows only the `Task` trait.

mod callbacks;
mod check;
mod host;
mod job;
mod parallelism;
mod parity;
mod predictions;
mod report;
mod resume;
mod test;
mod train;
mod whole_batch;

pub(crate) use check::{check_test, check_training};
pub(crate) use host::{check_device, check_file, check_weights, check_writable, checksum, device};
pub(crate) use job::{Job, Stopped, host, say};
pub(crate) use parallelism::Parallelism;
pub use report::Report;
pub(crate) use resume::changes;
pub(crate) use test::{TestOptions, WhichModel, test};
pub(crate) use train::train;

use crate::config::{DeviceKind, TaskConfig, table};
use crate::task::{Purpose, Task};
use std::path::Path;

/// The sources of a configuration: a file, `--device`, and `KEY VALUE` pairs.
pub(crate) struct Given<'a> {
    pub(crate) file: &'a Path,
    pub(crate) device: Option<DeviceKind>,
    /// `KEY VALUE KEY VALUE …`
    pub(crate) pairs: &'a [String],
}

/// Loads the configuration that the command line asks for.
pub(crate) fn load<C: TaskConfig>(given: &Given<'_>) -> anyhow::Result<C> {
    let mut config: C = table::load(Some(given.file), given.pairs)?;
    if let Some(device) = given.device {
        config.set_device(device);
    }
    Ok(config)
}

/// Creates a task and opens its files. A rank does this by itself, before it communicates.
fn opened<T: Task>(config: anyhow::Result<T::Config>, purpose: Purpose) -> anyhow::Result<T> {
    let mut task = checked::<T>(config, purpose)?;
    task.open()?;
    Ok(task)
}

fn checked<T: Task>(config: anyhow::Result<T::Config>, purpose: Purpose) -> anyhow::Result<T> {
    let task = T::new(config?, purpose)?;
    check_device(task.config().shared().run.device)?;
    Ok(task)
}
