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

use std::path::Path;

use drumline::config::deepspeed::Explanation;

use crate::config::{DeepSpeedFile, DeviceKind, TaskConfig, table};
use crate::task::{Purpose, Task};

/// The sources of a configuration: a file, `--device`, a `ds_config.json`, and `KEY VALUE` pairs.
pub(crate) struct Given<'a> {
    pub(crate) file: &'a Path,
    pub(crate) device: Option<DeviceKind>,
    /// `--deepspeed FILE`
    pub(crate) deepspeed: Option<DeepSpeedFile>,
    /// `KEY VALUE KEY VALUE …`
    pub(crate) pairs: &'a [String],
}

/// The sources of a training, and what it is to print first.
pub(crate) struct TrainOptions {
    /// Compares this many steps instead, and writes nothing.
    pub(crate) parity: Option<u64>,
    /// What each line of the `ds_config.json` does.
    pub(crate) explanation: Option<Explanation>,
}

/// Loads the configuration that the command line asks for.
pub(crate) fn load<C: TaskConfig>(given: &Given<'_>) -> anyhow::Result<C> {
    let file = Some(given.file);
    let mut config: C = match &given.deepspeed {
        None => table::load(file, given.pairs)?,
        Some(deepspeed) => table::load_with_deepspeed(file, given.pairs, deepspeed)?,
    };
    if let Some(device) = given.device {
        config.set_device(device);
    }
    Ok(config)
}

/// What each line of the `ds_config.json` does, if the command line names one.
pub(crate) fn explained<C: TaskConfig>(given: &Given<'_>) -> anyhow::Result<Option<Explanation>> {
    let explain = |file| table::explain_deepspeed::<C, _>(Some(given.file), given.pairs, file);
    Ok(given.deepspeed.as_ref().map(explain).transpose()?)
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
