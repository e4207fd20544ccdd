//! The folder of a run, read as it grows: `metrics.jsonl`, `ranks/*.json`, `log.txt`.
//!
//! ```text
//!   metrics.jsonl ─ events ─▶ History (curves, facts) ┐
//!   ranks/*.json  ─ status ─▶ Ranks (a row for each)  ├─▶ News: what a browser does not have yet
//!   log.txt       ─ lines ──▶ LogTail                 ┘
//! ```
//!
//! Nothing is ever written here, and no name in the folder comes from a browser.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::Serialize;

use super::history::{CurveEnd, Facts, History, Setup};
use super::log_tail::{LogNews, LogTail};
use super::ranks::{Condition, Ranks, Row};
use crate::bar::LOG;
use crate::events::{Follow, METRICS, Reason};
use crate::runs::{RunState, Summary};
use crate::status;
use crate::tail::{Begin, Tail, TailItem};

/// The most bytes of a file that are read at a time: a second's work at most.
const AT_ONCE: u64 = 64 << 20;
/// How much of an existing log is read.
const LOG_BEFORE_END: u64 = 256 << 10;
/// Without files of ranks: for how many seconds the metrics may be unchanged while the run counts as running.
const QUIET: f64 = 60.0;

/// A run's folder and what was read in it.
#[derive(Debug)]
pub(crate) struct RunFolder {
    folder: PathBuf,
    metrics: Follow,
    log: Tail,
    history: History,
    ranks: Ranks,
    log_tail: LogTail,
    /// The error of a file that could not be read.
    trouble: Option<String>,
    /// Time of the last event, by our clock, or that of the file.
    last_event: Option<f64>,
}

/// What a browser does not have yet, and what it always gets.
#[derive(Debug, Serialize)]
pub(super) struct News<'a> {
    state: RunState,
    #[serde(flatten)]
    facts: &'a Facts,
    trouble: Option<&'a str>,
    /// The configuration of the run, if the browser does not have it.
    setup: Option<&'a Setup>,
    /// Whether the curves that the browser has no longer count.
    reset: bool,
    curves: Vec<CurveEnd<'a>>,
    ranks: Vec<Row<'a>>,
    log: LogNews<'a>,
}

impl RunFolder {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self {
            metrics: Follow::new(&folder.join(METRICS)),
            log: Tail::new(folder.join(LOG), Begin::NearEnd(LOG_BEFORE_END)),
            history: History::default(),
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

    /// Reads what is new. Changes are marked with `version`.
    pub(super) fn refresh(&mut self, version: u64, now: f64) {
        let metrics = self.read_metrics(version, now);
        let log = &mut self.log_tail;
        let log = self.log.poll(AT_ONCE, |item| match item {
            TailItem::StartOver => log.start_over(version),
            TailItem::Line(line) => log.push(line, version),
        });
        let ranks = status::try_read(&self.folder).map(|files| self.ranks.update(files, now));
        let troubles = [(METRICS, metrics), (LOG, log), ("ranks/", ranks)];
        let trouble = troubles.into_iter().find_map(|(name, read)| Some((name, read.err()?)));
        self.trouble = trouble.map(|(name, error)| format!("cannot read {name}: {error}"));
    }

    /// Reads everything, however long that takes.
    pub(crate) fn refresh_all(&mut self, now: f64) {
        let mut read = None;
        loop {
            self.refresh(1, now);
            if self.metrics.offset() == std::mem::replace(&mut read, self.metrics.offset()) {
                return;
            }
        }
    }

    /// A summary of the run.
    pub(crate) fn summary(&self, now: f64) -> Summary {
        let facts = self.history.facts();
        let Facts { world_size, epoch, epochs, step, total_steps, left_s, .. } = *facts;
        let ranks = self.ranks.rows(world_size, now);
        let last_sign = ranks.iter().map(|row| row.status.time).chain(self.written()).fold(0.0, f64::max);
        Summary {
            folder: self.folder.clone(),
            state: self.state(&ranks, now),
            world_size,
            epoch: if self.history.has_begun() { epoch + 1 } else { 0 },
            epochs,
            step,
            total_steps,
            best: facts.best.clone(),
            left_s,
            age_s: (last_sign > 0.0).then(|| (now - last_sign).max(0.0)),
        }
    }

    /// What the page shows and a browser does not have yet; `since` is the last version that it saw.
    pub(super) fn news(&self, since: u64, now: f64) -> News<'_> {
        let ranks = self.ranks.rows(self.history.facts().world_size, now);
        News {
            state: self.state(&ranks, now),
            facts: self.history.facts(),
            trouble: self.trouble.as_deref(),
            setup: self.history.setup_since(since),
            reset: self.history.is_reset_since(since),
            curves: self.history.curves_since(since),
            ranks,
            log: self.log_tail.news(since),
        }
    }

    fn read_metrics(&mut self, version: u64, now: f64) -> io::Result<()> {
        let (history, mut has_news) = (&mut self.history, false);
        self.metrics.read_new(AT_ONCE, |item| {
            has_news = true;
            match item {
                TailItem::StartOver => history.start_over(version),
                TailItem::Line(event) => history.add(&event, version),
            }
        })?;
        if has_news {
            // Events that existed before the first read are as old as the file.
            let seen_before = self.last_event.is_some();
            self.last_event = Some(if seen_before { now } else { self.written().unwrap_or(now) });
        }
        Ok(())
    }

    /// When the metrics were last written, in seconds since 1970 by the clock of their file system.
    fn written(&self) -> Option<f64> {
        let modified = fs::metadata(self.folder.join(METRICS)).and_then(|data| data.modified()).ok()?;
        modified.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs_f64())
    }

    fn state(&self, ranks: &[Row<'_>], now: f64) -> RunState {
        let any = |states: &[Condition]| ranks.iter().any(|row| states.contains(&row.condition));
        match self.history.facts().reason {
            Some(Reason::Failed) => RunState::Failed,
            Some(Reason::Stopped) => RunState::Stopped,
            Some(Reason::Finished) => RunState::Finished,
            None if any(&[Condition::Running, Condition::Waiting]) => RunState::Running,
            None if any(&[Condition::Failed]) => RunState::Failed,
            None if any(&[Condition::Lost]) => RunState::Lost,
            None if !ranks.is_empty() => RunState::Finished,
            None if !self.history.has_begun() => RunState::Waiting,
            None if self.last_event.is_some_and(|time| now - time < QUIET) => RunState::Running,
            None => RunState::Silent,
        }
    }
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
        let sent = news(&mut read, 1, 2, 100.0);
        assert_eq!(
            (&sent["state"], &sent["step"], &sent["world_size"]),
            (&"running".into(), &5.into(), &2.into())
        );
        assert_eq!(sent["ranks"].as_array().unwrap().len(), 2);
        assert_eq!(sent["curves"][1]["points"].as_array().unwrap().len(), 5, "{sent}");
        assert!(!sent["log"]["lines"].as_array().unwrap().is_empty());
        // Nothing is new, and nothing is sent twice.
        let sent = news(&mut read, 2, 3, 100.1);
        assert_eq!((&sent["curves"], &sent["log"]["lines"]), (&Value::Array(vec![]), &Value::Array(vec![])));
        // Its ranks become silent, and then the end is written after all.
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
        let now = read.written().unwrap();
        assert_eq!(news(&mut read, 0, 1, now + 1.0)["state"], "running");
        assert_eq!(news(&mut read, 0, 2, now + QUIET + 1.0)["state"], "silent");
    }

    #[test]
    fn files_that_cannot_be_read_are_reported_and_unknown_files_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("ranks")).unwrap();
        for (name, text) in
            [("00000.json", "{}"), ("00001.json", "{"), ("x.json", "{}"), ("00002.json.tmp", "{}")]
        {
            fs::write(folder.path().join("ranks").join(name), text).unwrap();
        }
        fs::create_dir(folder.path().join("metrics.jsonl")).unwrap();
        let sent = news(&mut RunFolder::new(folder.path().to_owned()), 0, 1, 0.0);
        assert_eq!(sent["ranks"].as_array().unwrap().len(), 1);
        assert_eq!(sent["trouble"], "cannot read metrics.jsonl: not a plain file");
    }
}
