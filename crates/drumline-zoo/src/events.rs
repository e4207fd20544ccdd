//! `OUT_DIR/metrics.jsonl`: what happened, for programs. One JSON object a line; rank 0 writes it.
//!
//! ```text
//!   {"kind":"run", …}      a process begins to work on the run, at this step
//!   {"kind":"step", …}     after each step of the optimizer
//!   {"kind":"eval", …}     after each evaluation
//! ```
//!
//! Each step stands there once. A run that goes on from a checkpoint does the steps after it again: what the file says of
//! them is taken out first, and so is half a line that a crash has left. A run that begins anew keeps the file of the one
//! before as `metrics.1.jsonl`, `metrics.2.jsonl`, ….
//!
//! All losses and accuracies are means over the samples of all ranks.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

/// Name of the file in `OUT_DIR`.
pub const METRICS: &str = "metrics.jsonl";

/// A line of the file.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Event {
    /// The work begins, or goes on after `step` steps.
    Run(RunEvent),
    /// A step of the optimizer.
    Step(StepEvent),
    /// An evaluation on the test set.
    Eval(EvalEvent),
}

/// What is needed to do the run again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunEvent {
    /// Steps that were done before.
    pub step: u64,
    /// The epoch that it begins in.
    pub epoch: u64,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of nodes.
    pub num_nodes: usize,
    /// The seed that was taken.
    pub seed: u64,
    /// What computes, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Threads of each rank's kernels.
    pub num_threads: i32,
    /// Version of this program.
    pub drumline: &'static str,
    /// Version of libtorch that it is made for.
    pub libtorch: &'static str,
    /// Seconds since 1970.
    pub time: u64,
    /// Every key with its value.
    pub config: serde_json::Map<String, Value>,
}

/// A step: its own figures, not a mean over the steps before.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepEvent {
    /// Steps done, this one included.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Mean over the samples of all ranks.
    pub loss: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Part of the samples whose class was found, in percent.
    pub acc1: f64,
    /// Samples of all ranks in this step.
    pub samples: u64,
    /// Samples of all ranks in a second, by the time since the step before.
    pub samples_per_s: f64,
}

/// An evaluation on the whole test set, each sample once.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalEvent {
    /// Epochs done.
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
    /// Part of the samples whose class was found, in percent.
    pub acc1: f64,
    /// The same for the best `k`.
    pub acck: f64,
    /// That k.
    pub k: usize,
    /// Mean over the samples.
    pub loss: f64,
    /// Number of samples.
    pub samples: u64,
}

/// The file cannot be written or is not ours.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; try another OUT_DIR", path.display())]
pub struct EventsError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Where a run begins in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// A new run: a file that is there is kept under another name.
    Anew,
    /// The run goes on after this many steps.
    After {
        /// Steps that are done.
        step: u64,
    },
}

/// The open file.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Opens the file in `folder`, which is made if it is not there.
    ///
    /// ```
    /// use drumline_zoo::events::{Begin, Event, EventLog, EvalEvent};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let mut log = EventLog::open(folder.path(), Begin::Anew)?;
    /// let eval = EvalEvent { epoch: 1, step: 40, acc1: 50.0, acck: 90.0, k: 5, loss: 1.2, samples: 100 };
    /// log.write(&Event::Eval(eval))?;
    /// let text = std::fs::read_to_string(folder.path().join("metrics.jsonl"))?;
    /// assert!(text.starts_with(r#"{"kind":"eval","epoch":1,"#) && text.ends_with("}\n"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(folder: &Path, begin: Begin) -> Result<Self, EventsError> {
        let path = folder.join(METRICS);
        let opened = fs::create_dir_all(folder).and_then(|()| match begin {
            Begin::Anew => put_aside(&path),
            Begin::After { step } => keep_up_to(&path, step),
        });
        let opened = opened.and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
        opened.map(|file| Self { path: path.clone(), file }).map_err(|source| EventsError { path, source })
    }

    /// Adds a line, at once and as a whole. A number that JSON does not have, such as NaN, is written as null.
    pub fn write(&mut self, event: &Event) -> Result<(), EventsError> {
        let line = serde_json::to_string(event).map_err(io::Error::from);
        let written = line.and_then(|line| self.file.write_all(format!("{line}\n").as_bytes()));
        written.map_err(|source| EventsError { path: self.path.clone(), source })
    }
}

/// Moves the file of another run to the first name that is free.
fn put_aside(path: &Path) -> io::Result<()> {
    if !path.try_exists()? {
        return Ok(());
    }
    let mut numbers = 1..;
    let free = numbers.find_map(|number: u64| {
        let name = path.with_extension(format!("{number}.jsonl"));
        (!name.exists()).then_some(name)
    });
    fs::rename(path, free.expect("there is a number for each file of a folder"))
}

/// Takes out lines that tell of later steps, and what is no whole line.
fn keep_up_to(path: &Path, step: u64) -> io::Result<()> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        text => text?,
    };
    let text = String::from_utf8_lossy(&text);
    let kept: String = text.split_inclusive('\n').filter(|line| is_kept(line, step)).collect();
    if kept == text {
        return Ok(());
    }
    let beside = path.with_extension("jsonl.tmp");
    let mut file = File::create(&beside)?;
    file.write_all(kept.as_bytes())?;
    file.sync_all()?;
    fs::rename(beside, path)
}

fn is_kept(line: &str, step: u64) -> bool {
    let Ok(event) = serde_json::from_str::<Value>(line) else { return false };
    line.ends_with('\n') && event["step"].as_u64().is_none_or(|at| at <= step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Event {
        let (epoch, loss, lr, acc1, samples, samples_per_s) = (0, 0.5, 0.1, 0.25, 64, 100.0);
        Event::Step(StepEvent { step, epoch, loss, lr, acc1, samples, samples_per_s })
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn a_run_that_goes_on_tells_each_step_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS);
        let mut log = EventLog::open(folder.path(), Begin::Anew).unwrap();
        (1..=5).for_each(|at| log.write(&step(at)).unwrap());
        drop(log);
        // A crash in the midst of a line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"kind\":\"st").unwrap();
        let mut log = EventLog::open(folder.path(), Begin::After { step: 3 }).unwrap();
        (4..=6).for_each(|at| log.write(&step(at)).unwrap());
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_new_run_keeps_the_file_of_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        for at in 1..=3 {
            EventLog::open(folder.path(), Begin::Anew).unwrap().write(&step(at)).unwrap();
        }
        assert_eq!(steps(&folder.path().join("metrics.1.jsonl")), [1]);
        assert_eq!(steps(&folder.path().join("metrics.2.jsonl")), [2]);
        assert_eq!(steps(&folder.path().join(METRICS)), [3]);
    }

    #[test]
    fn going_on_without_a_file_begins_one() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        EventLog::open(&inner, Begin::After { step: 9 }).unwrap().write(&step(10)).unwrap();
        assert_eq!(steps(&inner.join(METRICS)), [10]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let said = EventLog::open(&file, Begin::Anew).unwrap_err().to_string();
        assert!(said.contains("file/metrics.jsonl") && said.contains("try another OUT_DIR"), "{said}");
    }
}
