//! What a rank did when: a file for Perfetto (`ui.perfetto.dev`) or `chrome://tracing`.
//!
//! ```text
//!   rank 0   compute        ▕ forward ▏▕     backward      ▏▕ optimizer ▏
//!            communication              ▕bucket 0▏▕bucket 1▏
//!            loading       ▏                                ▕  batch    ▏
//! ```
//! A rank is a process of the picture, and has a track for each kind of work. Spans of a track do not overlap, or are nested; a
//! span that would cross another gets a track of its own below (`lanes.rs`). An [`Arrow`] leads from a span to another, also of
//! another rank. Times are those of the machine's clock, so the files of several ranks can be merged: [`merge`].

mod lanes;
mod span;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use span::ArrowEnd;
pub use span::{Arrow, Span};

/// Name of the folder in `OUT_DIR`.
pub const TRACE: &str = "trace";

/// The most spans of a file: more would be slow to show, and would fill the memory.
const MOST_SPANS: usize = 200_000;

/// Times are counted from the last multiple of this, so that microseconds keep their decimals: those since 1970 fill an `f64`.
const PERIOD: Duration = Duration::from_secs(30 * 24 * 3600);

/// The kind of work of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Track {
    /// Forward, backward, optimizer.
    Compute,
    /// Reductions, and waiting for other ranks.
    Communication,
    /// Waiting for data.
    Loading,
}

impl Track {
    fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communication => "communication",
            Self::Loading => "loading",
        }
    }
}

/// A trace cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the trace {}: {source}", path.display())]
pub struct TraceError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// What one rank did.
///
/// ```
/// use std::time::{Duration, Instant};
/// use drumline_observe::trace::{Trace, Track, file_of};
///
/// let folder = tempfile::tempdir()?;
/// let mut trace = Trace::new(0);
/// let begin = Instant::now();
/// let end = begin + Duration::from_millis(3);
/// trace.span("forward", Track::Compute, begin, end, &[]);
/// trace.span("bucket 0", Track::Communication, begin, end, &[("bytes", 1_048_576.into())]);
/// trace.write(&file_of(folder.path(), 0))?; // OUT_DIR/trace/rank-00000.json
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Trace {
    rank: usize,
    /// The same moment on both clocks.
    clocks: (Instant, SystemTime),
    spans: Vec<Span>,
    left_out: usize,
}

/// A line of the file.
#[derive(Debug, Serialize)]
struct Line<'a> {
    name: &'a str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    /// In microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    /// Of an arrow, in hexadecimal digits: a viewer would round a large number.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// To which span of its track the head of an arrow belongs.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    args: BTreeMap<&'a str, Value>,
}

/// The whole file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Whole<L> {
    display_time_unit: String,
    /// What the times are counted from.
    base_time_nanoseconds: u64,
    trace_events: Vec<L>,
}

impl Trace {
    /// A trace without spans.
    pub fn new(rank: usize) -> Self {
        Self { rank, clocks: (Instant::now(), SystemTime::now()), spans: Vec::new(), left_out: 0 }
    }

    /// Adds a span from `begin` to `end`, as [`add`](Self::add) does.
    pub fn span(&mut self, name: &str, track: Track, begin: Instant, end: Instant, args: &[(&str, Value)]) {
        let span = Span::new(name, track, [begin, end]);
        self.add(args.iter().fold(span, |span, (name, value)| span.arg(name, value.clone())));
    }

    /// Adds a span. After 200,000 spans no more are kept; the file contains the number of missing ones.
    pub fn add(&mut self, span: Span) {
        if self.spans.len() == MOST_SPANS {
            self.left_out += 1;
        } else {
            self.spans.push(span);
        }
    }

    /// The number of spans.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there are no spans.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Writes the file; its folder is created if it does not exist.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        let mut lines = vec![named("process_name", self.rank, 0, json!(format!("rank {}", self.rank)))];
        if self.left_out > 0 {
            lines.push(named(
                "process_labels",
                self.rank,
                0,
                json!(format!("{} spans left out", self.left_out)),
            ));
        }
        lines.push(sorted("process_sort_index", self.rank, 0, self.rank));
        self.tracks(&mut lines);
        save(path, self.base(), lines)
    }

    /// Adds the spans of each track, in lanes in which they do not cross.
    fn tracks<'a>(&'a self, lines: &mut Vec<Line<'a>>) {
        let mut of_track: BTreeMap<Track, Vec<&Span>> = BTreeMap::new();
        self.spans.iter().for_each(|span| of_track.entry(span.track).or_default().push(span));
        let mut tid = 0;
        for (track, spans) in of_track {
            let times: Vec<_> = spans.iter().map(|span| (span.begin, span.end)).collect();
            let lanes = lanes::assign(&times);
            let num_lanes = lanes.iter().max().map_or(0, |most| most + 1);
            for lane in 0..num_lanes {
                lines.push(named("thread_name", self.rank, tid + lane, json!(track.name())));
                lines.push(sorted("thread_sort_index", self.rank, tid + lane, tid + lane));
            }
            for (span, lane) in spans.into_iter().zip(lanes) {
                lines.push(self.line(span, tid + lane));
                lines.extend(self.arrows(span, tid + lane));
            }
            tid += num_lanes;
        }
    }

    fn line<'a>(&self, span: &'a Span, tid: usize) -> Line<'a> {
        let (begin, end) = (self.nanoseconds(span.begin), self.nanoseconds(span.end));
        Line {
            name: &span.name,
            ph: "X",
            cat: Some(span.track.name()),
            ts: Some(begin as f64 / 1e3),
            dur: Some((end - begin) as f64 / 1e3),
            args: span.args.iter().map(|(name, value)| (name.as_str(), value.clone())).collect(),
            ..Line::of(self.rank, tid)
        }
    }

    /// The ends of arrows that a span has. A viewer gives each to the span of the track that lasts at its time: they lie
    /// within the span, as at its end the next one may begin.
    fn arrows<'a>(&self, span: &'a Span, tid: usize) -> impl Iterator<Item = Line<'a>> {
        let [begin, end] = [span.begin, span.end].map(|at| self.nanoseconds(at));
        let within = (end - begin).min(1);
        span.arrows.iter().map(move |(which, arrow)| {
            let (ph, at, bp) = match which {
                ArrowEnd::Tail => ("s", end - within, None),
                ArrowEnd::Head => ("f", begin, Some("e")),
            };
            Line {
                name: &arrow.name,
                ph,
                cat: Some("message"),
                ts: Some(at as f64 / 1e3),
                id: Some(format!("{:#x}", arrow.id)),
                bp,
                ..Line::of(self.rank, tid)
            }
        })
    }

    /// Nanoseconds from the beginning of the period to a moment.
    fn nanoseconds(&self, at: Instant) -> i64 {
        let (here, clock) = self.clocks;
        let clock = clock.duration_since(UNIX_EPOCH).unwrap_or_default() - self.base();
        let after = at.saturating_duration_since(here).as_nanos() as i64;
        let before = here.saturating_duration_since(at).as_nanos() as i64;
        clock.as_nanos() as i64 + after - before
    }

    fn base(&self) -> Duration {
        let clock = self.clocks.1.duration_since(UNIX_EPOCH).unwrap_or_default();
        PERIOD * (clock.as_secs() / PERIOD.as_secs()) as u32
    }
}

impl Line<'_> {
    /// A line that says something about a track.
    fn of(pid: usize, tid: usize) -> Self {
        let args = BTreeMap::new();
        Self { name: "", ph: "M", pid, tid, cat: None, ts: None, dur: None, id: None, bp: None, args }
    }
}

fn named(what: &'static str, pid: usize, tid: usize, name: Value) -> Line<'static> {
    let key = if what == "process_labels" { "labels" } else { "name" };
    Line { name: what, args: BTreeMap::from([(key, name)]), ..Line::of(pid, tid) }
}

fn sorted(what: &'static str, pid: usize, tid: usize, at: usize) -> Line<'static> {
    Line { name: what, args: BTreeMap::from([("sort_index", json!(at))]), ..Line::of(pid, tid) }
}

/// The path of a rank's trace.
pub fn file_of(out_dir: &Path, rank: usize) -> PathBuf {
    out_dir.join(TRACE).join(format!("rank-{rank:05}.json"))
}

/// Merges the traces of several ranks into one file. Ranks of different machines are as far apart as their clocks.
pub fn merge(files: &[PathBuf], into: &Path) -> Result<(), TraceError> {
    let mut all: Vec<Whole<Value>> = Vec::new();
    for path in files {
        let text = fs::read(path).map_err(|source| TraceError { path: path.clone(), source })?;
        let whole = serde_json::from_slice(&text);
        all.push(whole.map_err(|error| TraceError { path: path.clone(), source: error.into() })?);
    }
    let base = all.iter().map(|whole| whole.base_time_nanoseconds).min().unwrap_or_default();
    let mut lines = Vec::new();
    for whole in &mut all {
        let later = (whole.base_time_nanoseconds - base) as f64 / 1e3;
        for line in &mut whole.trace_events {
            if let Some(ts) = line["ts"].as_f64() {
                line["ts"] = json!(ts + later);
            }
        }
        lines.append(&mut whole.trace_events);
    }
    save(into, Duration::from_nanos(base), lines)
}

fn save<L: Serialize>(path: &Path, base: Duration, trace_events: Vec<L>) -> Result<(), TraceError> {
    let whole =
        Whole { display_time_unit: "ms".into(), base_time_nanoseconds: base.as_nanos() as u64, trace_events };
    let text = serde_json::to_vec(&whole).map_err(io::Error::from);
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    let written = folder.and(text).and_then(|text| fs::write(path, text));
    written.map_err(|source| TraceError { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests;
