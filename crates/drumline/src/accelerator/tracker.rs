//! Trackers, which log figures on rank 0.

mod csv_files;
mod json_lines;
mod tensorboard;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::Accelerator;
use crate::comm::shared_failure::with_causes;
use crate::data::loader::Cause;
use crate::device::name_of;

pub use csv_files::CsvFiles;
pub use json_lines::JsonLines;
pub use tensorboard::TensorBoard;

/// What a tracker learns at the beginning of a run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Started {
    /// The run's name.
    pub name: String,
    /// The configuration that the program passed: names and values.
    pub config: Map<String, Value>,
    /// The number of ranks.
    pub world_size: usize,
    /// The number of machines.
    pub num_nodes: usize,
    /// The accelerator's seed; 0 by default.
    pub seed: u64,
    /// The device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The epoch in which the run begins.
    pub epoch: u64,
    /// For a resumed run: the last step that was logged before the checkpoint was saved.
    pub resumed_at: Option<u64>,
}

/// The step and epoch of a log entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moment {
    /// The step, as the program counts steps.
    pub step: u64,
    /// The epoch of the first prepared loader.
    pub epoch: u64,
}

/// The result of a tracker's call.
pub type TrackerResult = Result<(), Cause>;

/// Logs figures somewhere. It is used on rank 0 only. A tracker that fails is reported once and not used again;
/// training continues.
pub trait Tracker {
    /// A run begins. It is called before the first figures, when it is known whether the run was resumed.
    fn begin(&mut self, run: &Started) -> TrackerResult;

    /// Logs the figures of a step, by name.
    fn log(&mut self, at: Moment, values: &BTreeMap<String, f64>) -> TrackerResult;

    /// The run has ended without an error.
    fn end(&mut self, at: Moment) -> TrackerResult;
}

/// The trackers that have not failed.
pub(super) struct Trackers {
    trackers: Vec<Box<dyn Tracker>>,
    seed: Option<u64>,
    /// Name and configuration of a run that has not begun for the trackers.
    upcoming: Option<(String, Map<String, Value>)>,
    last_step: u64,
    resumed_at: Option<u64>,
}

impl Trackers {
    pub(super) fn new(trackers: Vec<Box<dyn Tracker>>, seed: Option<u64>) -> Self {
        Self { trackers, seed, upcoming: Some(Default::default()), last_step: 0, resumed_at: None }
    }

    /// The last step that was logged.
    pub(super) fn last_step(&self) -> u64 {
        self.last_step
    }

    /// The run was resumed from a checkpoint that was saved after this logged step.
    pub(super) fn resume_at(&mut self, step: u64) {
        (self.last_step, self.resumed_at) = (step, Some(step));
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn Tracker) -> TrackerResult) {
        self.trackers.retain_mut(|tracker| match tell(&mut **tracker) {
            Ok(()) => true,
            Err(error) => {
                let causes = with_causes(error.as_ref());
                tracing::warn!("a tracker failed and is not used any more: {causes}");
                false
            }
        });
    }
}

impl Accelerator {
    /// Names the run and its configuration for the trackers. Every rank may call it; only rank 0's call counts.
    pub fn init_trackers(&self, name: impl Into<String>, config: Value) {
        let config = match config {
            Value::Object(config) => config,
            Value::Null => Map::new(),
            other => Map::from_iter([("config".to_owned(), other)]),
        };
        self.trackers.borrow_mut().upcoming = Some((name.into(), config));
    }

    /// Logs figures of a step. Every rank may call it; only rank 0's call counts.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let folder = tempfile::tempdir()?;
    /// let accelerator = Accelerator::builder().project_dir(folder.path()).build()?;
    /// accelerator.init_trackers("squares", serde_json::json!({ "lr": 0.1 }));
    /// accelerator.log(1, [("loss", 2.5), ("acc1", 50.0)]);
    /// accelerator.end_training();
    /// let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl"))?;
    /// assert!(lines.lines().nth(1).is_some_and(|line| line.contains(r#""loss":2.5"#)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn log<N: Into<String>>(&self, step: u64, values: impl IntoIterator<Item = (N, f64)>) {
        let values = values.into_iter().map(|(name, value)| (name.into(), value)).collect();
        self.begin_run();
        self.trackers.borrow_mut().last_step = step;
        let at = self.moment();
        self.trackers.borrow_mut().each(|tracker| tracker.log(at, &values));
    }

    /// Ends the run for the trackers, without an error.
    pub fn end_training(&self) {
        self.begin_run();
        let at = self.moment();
        self.trackers.borrow_mut().each(|tracker| tracker.end(at));
    }

    fn moment(&self) -> Moment {
        let epoch = self.shared.first_loader.get().map_or(0, |loader| loader.now().epoch);
        Moment { step: self.trackers.borrow().last_step, epoch }
    }

    /// Begins the run for the trackers, when there is something to log.
    fn begin_run(&self) {
        let epoch = self.moment().epoch;
        let trackers = &mut *self.trackers.borrow_mut();
        let Some((name, config)) = trackers.upcoming.take() else { return };
        let run = Started {
            name,
            config,
            world_size: self.num_processes(),
            num_nodes: self.group().num_nodes(),
            seed: trackers.seed.unwrap_or(0),
            device: name_of(self.device()),
            epoch,
            resumed_at: trackers.resumed_at,
        };
        trackers.each(|tracker| tracker.begin(&run));
    }
}
