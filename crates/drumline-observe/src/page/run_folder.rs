//! The folder of a run, read as far as it is written: `metrics.jsonl`, `ranks/*.json`, `log.txt`.
//!
//! ```text
//!   metrics.jsonl ─ lines ─▶ Story (curves, facts)  ┐
//!   ranks/*.json  ─ whole ─▶ Ranks (a row for each) ├─▶ News: what a browser does not have yet
//!   log.txt       ─ lines ─▶ LogTail                ┘
//! ```
//!
//! Nothing is ever written here, and no name in the folder comes from a browser.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::log_tail::{LogNews, LogTail};
use super::ranks::{Ranks, Row, State, Status};
use super::story::{CurveEnd, Facts, Story};
use super::tail::{Begin, Heard, Tail, open_file};

/// Of the metrics, at a time: a second's work at most.
const METRICS_AT_ONCE: u64 = 64 << 20;
/// How much of a log that is there already is read.
const LOG_BEFORE_END: u64 = 256 << 10;
/// A rank's file has a few hundred bytes.
const LONGEST_STATUS: u64 = 64 << 10;
/// Rows that a person looks at.
const MOST_RANKS: usize = 4096;
/// Without files of ranks: how long the metrics may stay as they are while the run goes on.
const QUIET: f64 = 60.0;

/// A run's folder and what was read in it.
#[derive(Debug)]
pub(super) struct RunFolder {
    folder: PathBuf,
    metrics: Tail,
    log: Tail,
    story: Story,
    ranks: Ranks,
    log_tail: LogTail,
    /// What could not be read.
    trouble: Option<String>,
    /// Time of the last event, by our clock, or the file's.
    last_event: Option<f64>,
}

/// How the run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RunState {
    /// Nothing was written yet.
    Waiting,
    Running,
    Finished,
    Stopped,
    Failed,
    /// Its ranks ended without a word.
    Lost,
    /// No ranks are known and nothing has been written for long.
    Silent,
}

/// What a browser does not have yet, and what it always gets.
#[derive(Debug, Serialize)]
pub(super) struct News<'a> {
    state: RunState,
    #[serde(flatten)]
    facts: &'a Facts,
    trouble: Option<&'a str>,
    /// Curves that the browser has are void.
    reset: bool,
    curves: Vec<CurveEnd<'a>>,
    ranks: Vec<Row<'a>>,
    log: LogNews<'a>,
}

impl RunFolder {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            metrics: Tail::new(folder.join("metrics.jsonl"), Begin::AtStart),
            log: Tail::new(folder.join("log.txt"), Begin::NearEnd(LOG_BEFORE_END)),
            story: Story::default(),
            ranks: Ranks::default(),
            log_tail: LogTail::default(),
            trouble: None,
            last_event: None,
            folder,
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads what is new. What changes is marked with `version`.
    pub(super) fn refresh(&mut self, version: u64, now: f64) {
        let metrics = self.read_metrics(version, now);
        let log = &mut self.log_tail;
        let log = self.log.poll(METRICS_AT_ONCE, |heard| match heard {
            Heard::StartOver => log.start_over(version),
            Heard::Line(line) => log.push(line, version),
        });
        let ranks = read_ranks(&self.folder.join("ranks")).map(|files| self.ranks.hear(files, now));
        let troubles = [("metrics.jsonl", metrics), ("log.txt", log), ("ranks/", ranks)];
        let trouble = troubles.into_iter().find_map(|(name, read)| Some((name, read.err()?)));
        self.trouble = trouble.map(|(name, error)| format!("cannot read {name}: {error}"));
    }

    /// All that is shown, without what a browser has that saw the version `since`.
    pub(super) fn news(&self, since: u64, now: f64) -> News<'_> {
        let ranks = self.ranks.rows(self.story.facts.world_size, now);
        News {
            state: self.state(&ranks, now),
            facts: &self.story.facts,
            trouble: self.trouble.as_deref(),
            reset: self.story.is_reset_since(since),
            curves: self.story.curves_since(since),
            ranks,
            log: self.log_tail.news(since),
        }
    }

    fn read_metrics(&mut self, version: u64, now: f64) -> io::Result<()> {
        let (story, mut has_news) = (&mut self.story, false);
        self.metrics.poll(METRICS_AT_ONCE, |heard| {
            has_news = true;
            match heard {
                Heard::StartOver => story.start_over(version),
                Heard::Line(line) => story.hear(line, version),
            }
        })?;
        if has_news {
            // Events that were there before we looked are as old as the file.
            let seen_before = self.last_event.is_some();
            self.last_event = Some(if seen_before { now } else { self.metrics.modified().unwrap_or(now) });
        }
        Ok(())
    }

    fn state(&self, ranks: &[Row<'_>], now: f64) -> RunState {
        let any = |states: &[State]| ranks.iter().any(|row| states.contains(&row.condition));
        match self.story.facts.reason.as_deref() {
            Some("failed") => RunState::Failed,
            Some("stopped") => RunState::Stopped,
            Some(_) => RunState::Finished,
            None if any(&[State::Running, State::Waiting]) => RunState::Running,
            None if any(&[State::Failed]) => RunState::Failed,
            None if any(&[State::Lost]) => RunState::Lost,
            None if !ranks.is_empty() => RunState::Finished,
            None if !self.story.has_begun() => RunState::Waiting,
            None if self.last_event.is_some_and(|time| now - time < QUIET) => RunState::Running,
            None => RunState::Silent,
        }
    }
}

/// Each rank's file. One that cannot be read or understood is left out: it is somebody else's or of a later version.
fn read_ranks(folder: &Path) -> io::Result<Vec<Status>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let files = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_a_ranks(path));
    Ok(files.take(MOST_RANKS).filter_map(|path| read_status(&path).ok()).collect())
}

fn is_a_ranks(path: &Path) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn read_status(path: &Path) -> io::Result<Status> {
    let (file, length, _) = open_file(path)?;
    let mut text = Vec::with_capacity(usize::try_from(length.min(LONGEST_STATUS)).unwrap_or(0));
    file.take(LONGEST_STATUS).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeRun;
    use serde_json::Value;

    fn news(folder: &mut RunFolder, since: u64, version: u64, now: f64) -> Value {
        folder.refresh(version, now);
        serde_json::to_value(folder.news(since, now)).unwrap()
    }

    #[test]
    fn a_run_from_its_first_file_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut read = RunFolder::new(folder.path().to_owned());
        assert_eq!(news(&mut read, 0, 1, 0.0)["state"], "waiting");
        let mut run = FakeRun::create(folder.path(), 2).unwrap();
        (0..5).for_each(|_| run.step().unwrap());
        run.write_ranks(100.0).unwrap();
        let told = news(&mut read, 1, 2, 100.0);
        assert_eq!(
            (&told["state"], &told["step"], &told["world_size"]),
            (&"running".into(), &5.into(), &2.into())
        );
        assert_eq!(told["ranks"].as_array().unwrap().len(), 2);
        assert_eq!(told["curves"][1]["points"].as_array().unwrap().len(), 5, "{told}");
        assert!(!told["log"]["lines"].as_array().unwrap().is_empty());
        // Nothing new: nothing is sent twice.
        let told = news(&mut read, 2, 3, 100.1);
        assert_eq!((&told["curves"], &told["log"]["lines"]), (&Value::Array(vec![]), &Value::Array(vec![])));
        // Its ranks fall silent, and then it has ended after all.
        assert_eq!(news(&mut read, 3, 4, 106.0)["state"], "lost");
        run.end("finished", None).unwrap();
        assert_eq!(news(&mut read, 4, 5, 106.1)["state"], "finished");
    }

    #[test]
    fn metrics_alone_are_a_run_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"kind\":\"step\",\"step\":1,\"loss\":1}\n").unwrap();
        let mut read = RunFolder::new(folder.path().to_owned());
        let now = read.metrics.modified().unwrap();
        assert_eq!(news(&mut read, 0, 1, now + 1.0)["state"], "running");
        assert_eq!(news(&mut read, 0, 2, now + QUIET + 1.0)["state"], "silent");
    }

    #[test]
    fn what_cannot_be_read_is_told_and_strange_files_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("ranks")).unwrap();
        for (name, text) in
            [("00000.json", "{}"), ("00001.json", "{"), ("x.json", "{}"), ("00002.json.tmp", "{}")]
        {
            fs::write(folder.path().join("ranks").join(name), text).unwrap();
        }
        fs::create_dir(folder.path().join("metrics.jsonl")).unwrap();
        let told = news(&mut RunFolder::new(folder.path().to_owned()), 0, 1, 0.0);
        assert_eq!(told["ranks"].as_array().unwrap().len(), 1);
        assert_eq!(told["trouble"], "cannot read metrics.jsonl: not a plain file");
    }
}
