//! `metrics.jsonl` read again for one browser: all of it as CSV, or the curves of some steps in full.
//!
//! ```text
//!   /metrics.csv?run=0               kind,step,epoch,time,samples,loss,lr,samples_per_s,acc1,…     sent while it is read
//!   /detail?run=0&from=500&to=600    curves as in /update, but of those steps only, in full resolution
//! ```
//! A request names a run by its number on the page, never a file.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use futures_core::Stream;
use tokio::sync::mpsc;

use super::history::History;
use crate::events::{Event, Follow, METRICS};

/// The columns of every step; metrics follow by name.
const COLUMNS: [&str; 8] = ["kind", "step", "epoch", "time", "samples", "loss", "lr", "samples_per_s"];
/// Figures that have a column among these.
const OWN: [&str; 3] = ["loss", "lr", "samples_per_s"];
/// Bytes that are sent together, and how many such parts may wait for a slow browser.
const PART: usize = 64 << 10;
const PARTS: usize = 4;

/// The curves of some steps, as JSON.
pub(super) fn detail(folder: &Path, steps: RangeInclusive<u64>) -> io::Result<String> {
    let mut history = History::within(steps);
    Follow::new(&folder.join(METRICS)).read_all(|| true, |event| history.add(&event, 1))?;
    Ok(serde_json::to_string(&history.curves_since(0))?)
}

/// All steps and evaluations as CSV. Reading ends when the browser leaves.
pub(super) fn csv(folder: PathBuf) -> Body {
    let (sender, receiver) = mpsc::channel(PARTS);
    // An error while reading cuts the answer short, since its head has been sent by then.
    tokio::task::spawn_blocking(move || write_csv(&folder, &mut Sink { sender, part: Vec::new() }).ok());
    Body::from_stream(Parts(receiver))
}

fn write_csv(folder: &Path, sink: &mut Sink) -> io::Result<()> {
    let path = folder.join(METRICS);
    let mut names = BTreeSet::new();
    let mut note = |event: Event| {
        let others = event.figures().map(|(name, _)| name).filter(|name| !OWN.contains(name));
        names.extend(others.map(str::to_owned));
    };
    let sender = sink.sender.clone();
    Follow::new(&path).read_all(|| !sender.is_closed(), &mut note)?;
    let mut rows = csv::Writer::from_writer(sink);
    rows.write_record(COLUMNS.into_iter().map(str::to_owned).chain(names.iter().map(|name| header(name))))?;
    let mut written = Ok(());
    Follow::new(&path).read_all(
        || !sender.is_closed(),
        |event| {
            if let Some(row) = row(&event, &names).filter(|_| written.is_ok()) {
                written = rows.write_record(row);
            }
        },
    )?;
    written?;
    rows.flush()
}

/// A name that no spreadsheet takes for a formula.
fn header(name: &str) -> String {
    let is_formula = name.starts_with(['=', '+', '-', '@', '\t', '\r']);
    if is_formula { format!("'{name}") } else { name.to_owned() }
}

fn row(event: &Event, names: &BTreeSet<String>) -> Option<Vec<String>> {
    let (kind, step, epoch, time, samples) = match event {
        Event::Step(step) => ("step", step.step, step.epoch, step.time, step.samples),
        Event::Eval(eval) => ("eval", eval.step, eval.epoch, eval.time, eval.samples),
        Event::Run(_) | Event::Epoch(_) | Event::End(_) => return None,
    };
    let figures: Vec<_> = event.figures().collect();
    let figure = |name: &str| {
        let value = figures.iter().find(|(known, _)| *known == name).map(|(_, value)| value);
        value.map_or_else(String::new, |value| if value.is_nan() { "nan".into() } else { value.to_string() })
    };
    let time = time.map_or_else(String::new, |time| format!("{time:.3}"));
    let fixed = [kind.to_owned(), step.to_string(), epoch.to_string(), time, samples.to_string()];
    let names = OWN.into_iter().chain(names.iter().map(String::as_str));
    Some(fixed.into_iter().chain(names.map(figure)).collect())
}

/// Bytes on their way to a browser.
struct Sink {
    sender: mpsc::Sender<Bytes>,
    part: Vec<u8>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.part.extend_from_slice(bytes);
        if self.part.len() >= PART {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let part = Bytes::from(std::mem::take(&mut self.part));
        self.sender.blocking_send(part).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

struct Parts(mpsc::Receiver<Bytes>);

impl Stream for Parts {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|part| part.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(lines: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(METRICS), lines.join("\n") + "\n").unwrap();
        folder
    }

    fn csv_of(folder: &Path) -> String {
        let (sender, mut receiver) = mpsc::channel(PARTS);
        let folder = folder.to_owned();
        let writer = std::thread::spawn(move || write_csv(&folder, &mut Sink { sender, part: Vec::new() }));
        let mut text = Vec::new();
        while let Some(part) = receiver.blocking_recv() {
            text.extend_from_slice(&part);
        }
        writer.join().unwrap().unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn every_step_and_evaluation_is_a_row() {
        let folder = folder(&[
            r#"{"kind":"run","step":0}"#,
            r#"{"kind":"step","step":1,"epoch":0,"loss":2.5,"lr":0.1,"samples":64,"samples_per_s":9.5,"time":7.25,"acc,1":50}"#,
            r#"{"kind":"step","step":2,"epoch":0,"loss":null,"lr":0.1,"samples":64,"=x":1}"#,
            r#"{"kind":"eval","step":2,"epoch":1,"samples":10,"loss":1.5,"acc,1":60}"#,
        ]);
        let expected = "kind,step,epoch,time,samples,loss,lr,samples_per_s,'=x,\"acc,1\"\n\
            step,1,0,7.250,64,2.5,0.1,9.5,,50\n\
            step,2,0,,64,nan,0.1,,1,\n\
            eval,2,1,,10,1.5,,,,60\n";
        assert_eq!(csv_of(folder.path()), expected);
    }

    #[test]
    fn a_long_run_comes_in_parts_and_ends_when_nobody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step: u64| format!("{{\"kind\":\"step\",\"step\":{step},\"loss\":1.5}}\n");
        std::fs::write(folder.path().join(METRICS), (1..=60_000).map(line).collect::<String>()).unwrap();
        assert_eq!(csv_of(folder.path()).lines().count(), 60_001);
        let (sender, receiver) = mpsc::channel(1);
        drop(receiver);
        let written = write_csv(folder.path(), &mut Sink { sender, part: Vec::new() });
        assert!(written.is_err(), "there is no reader");
        let some: serde_json::Value =
            serde_json::from_str(&detail(folder.path(), 40_000..=40_009).unwrap()).unwrap();
        assert_eq!(some[0]["points"].as_array().unwrap().len(), 10);
        assert_eq!((&some[0]["points"][0][0], &some[0]["stride"]), (&40_000.into(), &1.into()));
    }
}
