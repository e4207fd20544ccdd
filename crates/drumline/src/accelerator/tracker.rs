//! Trackers: where figures are logged to, on rank 0.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::Accelerator;

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
    /// Where it computes.
    pub device: String,
}

/// A place to which figures are logged. It exists on rank 0 alone. One that fails is told of once and then left out: training goes on.
pub trait Tracker {
    /// A run begins.
    fn begin(&mut self, run: &Started) -> io::Result<()>;

    /// Figures of a step, by name.
    fn log(&mut self, step: u64, values: &BTreeMap<String, f64>) -> io::Result<()>;

    /// The run has ended well.
    fn end(&mut self, step: u64) -> io::Result<()>;
}

/// `metrics.jsonl` in a folder: an object a line, of the kinds `run`, `step` and `end`. A run that goes on adds to what is there.
#[derive(Debug)]
pub struct JsonLines {
    folder: PathBuf,
    file: Option<File>,
}

impl JsonLines {
    /// Lines in `folder`, which is made if need be.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), file: None }
    }

    fn write(&mut self, line: &Value) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                std::fs::create_dir_all(&self.folder)?;
                let file =
                    OpenOptions::new().create(true).append(true).open(self.folder.join("metrics.jsonl"))?;
                self.file.insert(file)
            }
        };
        // At once, so that a reader never sees half a line.
        file.write_all(format!("{line}\n").as_bytes())
    }
}

impl Tracker for JsonLines {
    fn begin(&mut self, run: &Started) -> io::Result<()> {
        self.write(&json!({
            "kind": "run", "step": 0, "epoch": 0, "name": run.name, "world_size": run.world_size, "num_nodes": run.num_nodes,
            "seed": run.seed, "device": run.device, "num_threads": tch::get_num_threads(),
            "drumline": env!("CARGO_PKG_VERSION"), "time": now(), "config": run.config,
        }))
    }

    fn log(&mut self, step: u64, values: &BTreeMap<String, f64>) -> io::Result<()> {
        let mut line: Map<String, Value> =
            values.iter().map(|(name, value)| (name.clone(), (*value).into())).collect();
        line.insert("kind".into(), "step".into());
        line.insert("step".into(), step.into());
        self.write(&line.into())
    }

    fn end(&mut self, step: u64) -> io::Result<()> {
        self.write(
            &json!({ "kind": "end", "step": step, "reason": "finished", "error": null, "time": now() }),
        )
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The trackers that work.
pub(super) struct Trackers {
    trackers: Vec<Box<dyn Tracker>>,
    seed: Option<u64>,
    last_step: u64,
}

impl Trackers {
    pub(super) fn new(trackers: Vec<Box<dyn Tracker>>, seed: Option<u64>) -> Self {
        Self { trackers, seed, last_step: 0 }
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn Tracker) -> io::Result<()>) {
        self.trackers.retain_mut(|tracker| match tell(&mut **tracker) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!("a tracker cannot go on, and is left out from now on: {error}");
                false
            }
        });
    }
}

impl Accelerator {
    /// Tells the trackers that a run begins. Every rank may call it; rank 0's counts.
    pub fn init_trackers(&self, name: impl Into<String>, config: Value) {
        let trackers = &mut *self.trackers.borrow_mut();
        let run = Started {
            name: name.into(),
            config: match config {
                Value::Object(config) => config,
                Value::Null => Map::new(),
                other => Map::from_iter([("config".to_owned(), other)]),
            },
            world_size: self.num_processes(),
            num_nodes: self.group().num_nodes(),
            seed: trackers.seed.unwrap_or(0),
            device: format!("{:?}", self.device()).to_lowercase(),
        };
        trackers.each(|tracker| tracker.begin(&run));
    }

    /// Logs figures of a step. Every rank may call it; rank 0's count.
    ///
    /// ```
    /// # use drumline::Accelerator;
    /// let folder = tempfile::tempdir()?;
    /// let accelerator = Accelerator::builder().project_dir(folder.path()).build()?;
    /// accelerator.init_trackers("squares", serde_json::json!({ "lr": 0.1 }));
    /// accelerator.log(1, [("loss", 2.5)]);
    /// accelerator.end_training();
    /// let lines = std::fs::read_to_string(folder.path().join("metrics.jsonl"))?;
    /// assert_eq!(lines.lines().nth(1), Some(r#"{"kind":"step","loss":2.5,"step":1}"#));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn log<N: Into<String>>(&self, step: u64, values: impl IntoIterator<Item = (N, f64)>) {
        let values = values.into_iter().map(|(name, value)| (name.into(), value)).collect();
        let trackers = &mut *self.trackers.borrow_mut();
        trackers.last_step = step;
        trackers.each(|tracker| tracker.log(step, &values));
    }

    /// Tells the trackers that the run has ended well.
    pub fn end_training(&self) {
        let trackers = &mut *self.trackers.borrow_mut();
        let step = trackers.last_step;
        trackers.each(|tracker| tracker.end(step));
    }
}
