//! Writes `metrics.jsonl`: each line at once and as a whole, and each step once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use drumline_files::{Durability, replace};
use serde_json::Value;

use super::{Event, EventsError, METRICS};

/// Where a run starts in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// A new run: an existing file is kept under another name.
    New,
    /// The run resumes after this many steps.
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
    /// Opens the file in `folder`, which is created if it does not exist.
    ///
    /// ```
    /// use drumline_observe::events::{self, Begin, EvalEvent, Event, EventLog};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let mut log = EventLog::open(folder.path(), Begin::New)?;
    /// let metrics = events::metrics([("acc1", 50.0), ("loss", 1.2)]);
    /// let event = Event::Eval(EvalEvent { epoch: 1, step: 40, samples: 100, metrics, ..EvalEvent::default() });
    /// log.write(&event)?;
    /// assert_eq!(events::read(&folder.path().join("metrics.jsonl"))?, [event]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(folder: &Path, begin: Begin) -> Result<Self, EventsError> {
        let path = folder.join(METRICS);
        let opened = fs::create_dir_all(folder).and_then(|()| match begin {
            Begin::New => put_aside(&path),
            Begin::After { step } => keep_up_to(&path, step),
        });
        let opened = opened.and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
        opened
            .map(|file| Self { path: path.clone(), file })
            .map_err(|source| EventsError::Write { path, source })
    }

    /// Adds a line, at once and as a whole. A number that JSON does not have, such as NaN, is written as null.
    pub fn write(&mut self, event: &Event) -> Result<(), EventsError> {
        let line = serde_json::to_string(event).map_err(io::Error::from);
        let written = line.and_then(|line| self.file.write_all(format!("{line}\n").as_bytes()));
        written.map_err(|source| EventsError::Write { path: self.path.clone(), source })
    }
}

/// Moves the file of another run to the first free name.
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

/// Removes lines of later steps, and partial lines.
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
    replace(path, kept, Durability::Disk)
}

fn is_kept(line: &str, step: u64) -> bool {
    let Ok(event) = serde_json::from_str::<Value>(line) else { return false };
    line.ends_with('\n') && event["step"].as_u64().is_none_or(|at| at <= step)
}

#[cfg(test)]
mod tests {
    use super::super::{StepEvent, read};
    use super::*;

    fn step(step: u64) -> Event {
        Event::Step(StepEvent { step, loss: 0.5, lr: 0.1, samples: 64, ..StepEvent::default() })
    }

    fn steps(path: &Path) -> Vec<u64> {
        let events = read(path).unwrap();
        let step = |event: &Event| match event {
            Event::Step(step) => Some(step.step),
            _ => None,
        };
        events.iter().filter_map(step).collect()
    }

    #[test]
    fn a_resumed_run_has_each_step_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS);
        let mut log = EventLog::open(folder.path(), Begin::New).unwrap();
        (1..=5).for_each(|at| log.write(&step(at)).unwrap());
        drop(log);
        // A crash in the middle of a line.
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
            EventLog::open(folder.path(), Begin::New).unwrap().write(&step(at)).unwrap();
        }
        assert_eq!(steps(&folder.path().join("metrics.1.jsonl")), [1]);
        assert_eq!(steps(&folder.path().join("metrics.2.jsonl")), [2]);
        assert_eq!(steps(&folder.path().join(METRICS)), [3]);
    }

    #[test]
    fn resuming_without_a_file_creates_one() {
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
        let error = EventLog::open(&file, Begin::New).unwrap_err().to_string();
        assert!(error.contains("file/metrics.jsonl") && error.contains("try another OUT_DIR"), "{error}");
    }
}
