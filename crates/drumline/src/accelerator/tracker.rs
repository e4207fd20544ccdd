//! Trackers: where figures are logged to, on rank 0.

mod json_lines;
mod tensorboard;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::Accelerator;
use crate::device::name_of;
use crate::loader::Cause;
use crate::shared_failure::in_words;

pub use json_lines::JsonLines;
pub use tensorboard::TensorBoard;

/// What a tracker is told when a run begins.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Started {
    /// The run's name.
    pub name: String,
    /// Its configuration, as the program gives it: names and values.
    pub config: Map<String, Value>,
    /// How many ranks it has.
    pub world_size: usize,
    /// On how many machines.
    pub num_nodes: usize,
    /// The accelerator's seed; 0 if it has none.
    pub seed: u64,
    /// Where it computes, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The epoch that it begins in.
    pub epoch: u64,
    /// Where it goes on from a checkpoint: the last step that was logged before that was saved.
    pub resumed_at: Option<u64>,
}

/// When something is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Moment {
    /// The step, as the program counts them.
    pub step: u64,
    /// The epoch that the first prepared loader is in.
    pub epoch: u64,
}

/// What a tracker answers.
pub type TrackerResult = Result<(), Cause>;

/// A place to which figures are logged. It exists on rank 0 alone. One that fails is told of once and then left out: training goes on.
pub trait Tracker {
    /// A run begins; told with its first figures, when it is known whether it goes on from a checkpoint.
    fn begin(&mut self, run: &Started) -> TrackerResult;

    /// Figures of a step, by name.
    fn log(&mut self, at: Moment, values: &BTreeMap<String, f64>) -> TrackerResult;

    /// The run has ended well.
    fn end(&mut self, at: Moment) -> TrackerResult;
}

/// The trackers that work.
pub(super) struct Trackers {
    trackers: Vec<Box<dyn Tracker>>,
    seed: Option<u64>,
    /// Name and configuration of a run whose beginning they have not been told.
    coming: Option<(String, Map<String, Value>)>,
    last_step: u64,
    resumed_at: Option<u64>,
}

impl Trackers {
    pub(super) fn new(trackers: Vec<Box<dyn Tracker>>, seed: Option<u64>) -> Self {
        Self { trackers, seed, coming: Some(Default::default()), last_step: 0, resumed_at: None }
    }

    /// The last step that was logged.
    pub(super) fn last_step(&self) -> u64 {
        self.last_step
    }

    /// The run goes on from a checkpoint that was saved after this step was logged.
    pub(super) fn resume_at(&mut self, step: u64) {
        (self.last_step, self.resumed_at) = (step, Some(step));
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn Tracker) -> TrackerResult) {
        self.trackers.retain_mut(|tracker| match tell(&mut **tracker) {
            Ok(()) => true,
            Err(error) => {
                let words = in_words(error.as_ref());
                tracing::warn!("a tracker cannot go on, and is left out from now on: {words}");
                false
            }
        });
    }
}

impl Accelerator {
    /// Names the run that begins, for the trackers, and its configuration. Every rank may call it; rank 0's counts.
    pub fn init_trackers(&self, name: impl Into<String>, config: Value) {
        let config = match config {
            Value::Object(config) => config,
            Value::Null => Map::new(),
            other => Map::from_iter([("config".to_owned(), other)]),
        };
        self.trackers.borrow_mut().coming = Some((name.into(), config));
    }

    /// Logs figures of a step. Every rank may call it; rank 0's count.
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
        self.tell_of_beginning();
        self.trackers.borrow_mut().last_step = step;
        let at = self.moment();
        self.trackers.borrow_mut().each(|tracker| tracker.log(at, &values));
    }

    /// Tells the trackers that the run has ended well.
    pub fn end_training(&self) {
        self.tell_of_beginning();
        let at = self.moment();
        self.trackers.borrow_mut().each(|tracker| tracker.end(at));
    }

    fn moment(&self) -> Moment {
        let epoch = self.shared.place.get().map_or(0, |place| place.now().epoch);
        Moment { step: self.trackers.borrow().last_step, epoch }
    }

    /// A run begins for its trackers when there is something to log.
    fn tell_of_beginning(&self) {
        let epoch = self.moment().epoch;
        let trackers = &mut *self.trackers.borrow_mut();
        let Some((name, config)) = trackers.coming.take() else { return };
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
