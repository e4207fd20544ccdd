//! `OUT_DIR/ranks/00000.json`: what each rank is doing, for whoever looks.
//!
//! ```text
//!   training ──step, add_load, op, …──▶ Status ◀──twice a second── StatusWriter ──written beside, renamed──▶ ranks/00003.json
//! ```
//! The training sets numbers in memory; a thread writes them. A reader always sees a whole file, and calls a rank lost that
//! has not written for [`LOST_AFTER`] and has not said that it ends.

mod memory;
mod writer;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use memory::Memory;
pub use writer::{StatusError, StatusWriter};

/// Name of the folder in `OUT_DIR`.
pub const RANKS: &str = "ranks";

/// A rank that says nothing for this long, and has not ended, is lost.
pub const LOST_AFTER: Duration = Duration::from_secs(5);

/// What a rank's file says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankStatus {
    /// Its number.
    pub rank: usize,
    /// The machine that it runs on.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Whether it works.
    pub state: State,
    /// What went wrong, if something did.
    pub error: Option<String>,
    /// Steps done.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// The collective that it is in, such as `all_reduce(1024 f32, sum) #12 at src/a.rs:91`.
    pub op: Option<String>,
    /// Seconds since that began.
    pub op_s: f64,
    /// Seconds that it has waited for data, since the run began.
    pub load_s: f64,
    /// Seconds in forward, backward and the optimizer.
    pub compute_s: f64,
    /// Seconds in which it waited for other ranks.
    pub comm_s: f64,
    /// Memory that it uses.
    pub memory_bytes: u64,
    /// The most that it has used.
    pub peak_bytes: u64,
    /// Its own samples in a second.
    pub samples_per_s: f64,
    /// When this was written: seconds since 1970.
    pub time: f64,
}

/// Whether a rank works.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It does.
    #[default]
    Running,
    /// It has done its work, or was asked to stop.
    Ended,
    /// It has found something wrong.
    Failed,
}

impl RankStatus {
    /// Whether the rank went without a word. `newest`: the latest [`time`](Self::time) of the run's files, or now.
    pub fn is_lost(&self, newest: f64) -> bool {
        self.state == State::Running && newest - self.time > LOST_AFTER.as_secs_f64()
    }
}

/// What all ranks of a run say, in rank order; files that are broken are left out.
pub fn read(out_dir: &Path) -> Vec<RankStatus> {
    let Ok(files) = std::fs::read_dir(out_dir.join(RANKS)) else { return Vec::new() };
    let paths = files.filter_map(|entry| Some(entry.ok()?.path()));
    let texts = paths.filter(|path| path.extension().is_some_and(|end| end == "json")).map(std::fs::read);
    let mut all: Vec<RankStatus> =
        texts.filter_map(|text| serde_json::from_slice(&text.ok()?).ok()).collect();
    all.sort_by_key(|status| status.rank);
    all
}

/// Where the training says what it does. Cheap to clone, and all clones are the same; a call takes some ten nanoseconds.
///
/// ```
/// use std::time::Duration;
/// use drumline_observe::status::{self, Status, StatusWriter};
///
/// let folder = tempfile::tempdir()?;
/// let status = Status::default();
/// let writer = StatusWriter::start(folder.path(), 3, &status)?;
/// status.step(12, 0);
/// status.add_load(Duration::from_millis(1500));
/// status.ended();
/// drop(writer); // writes a last time
/// let read = status::read(folder.path());
/// assert_eq!((read[0].rank, read[0].step, read[0].load_s), (3, 12, 1.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct Status {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    state: State,
    error: Option<String>,
    step: u64,
    epoch: u64,
    op: Option<(String, Instant)>,
    op_from: Option<Box<dyn OpSource>>,
    load: Duration,
    compute: Duration,
    comm: Duration,
    samples_per_s: f64,
}

/// What is asked for the collective that a rank is in, and how long it has been there.
trait OpSource: Fn() -> Option<(String, Duration)> + Send {}
impl<F: Fn() -> Option<(String, Duration)> + Send> OpSource for F {}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.lock();
        f.debug_struct("Status")
            .field("state", &shared.state)
            .field("step", &shared.step)
            .finish_non_exhaustive()
    }
}

impl Status {
    /// So many steps are done, the last one in this epoch (from 0).
    pub fn step(&self, step: u64, epoch: u64) {
        let mut shared = self.lock();
        (shared.step, shared.epoch) = (step, epoch);
    }

    /// How many samples this rank does in a second.
    pub fn samples_per_s(&self, rate: f64) {
        self.lock().samples_per_s = rate;
    }

    /// Time in which it waited for data.
    pub fn add_load(&self, time: Duration) {
        self.lock().load += time;
    }

    /// Time in forward, backward and the optimizer.
    pub fn add_compute(&self, time: Duration) {
        self.lock().compute += time;
    }

    /// Time in which it waited for other ranks.
    pub fn add_comm(&self, time: Duration) {
        self.lock().comm += time;
    }

    /// The collective that begins now; `None` at its end.
    pub fn op(&self, op: Option<String>) {
        self.lock().op = op.map(|op| (op, Instant::now()));
    }

    /// Who is asked, each time the file is written, which collective the rank is in and since when: costs nothing in between.
    /// What [`op`](Self::op) was told comes first.
    pub fn op_from(&self, source: impl Fn() -> Option<(String, Duration)> + Send + 'static) {
        self.lock().op_from = Some(Box::new(source));
    }

    /// The rank's work is done.
    pub fn ended(&self) {
        self.lock().state = State::Ended;
    }

    /// The rank has found something wrong.
    pub fn failed(&self, error: impl Into<String>) {
        let mut shared = self.lock();
        (shared.state, shared.error) = (State::Failed, Some(error.into()));
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the file shall say now.
    fn now(&self, place: &Place) -> RankStatus {
        let Place { rank, host, pid } = place;
        let memory = Memory::of_this_process().unwrap_or_default();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let shared = self.lock();
        let told = shared.op.clone().map(|(op, since)| (op, since.elapsed()));
        let op = told.or_else(|| shared.op_from.as_ref().and_then(|source| source()));
        let (op, op_time) = op.map_or((None, Duration::ZERO), |(op, time)| (Some(op), time));
        RankStatus {
            rank: *rank,
            host: host.clone(),
            pid: *pid,
            state: shared.state,
            error: shared.error.clone(),
            step: shared.step,
            epoch: shared.epoch,
            op,
            op_s: op_time.as_secs_f64(),
            load_s: shared.load.as_secs_f64(),
            compute_s: shared.compute.as_secs_f64(),
            comm_s: shared.comm.as_secs_f64(),
            memory_bytes: memory.used,
            peak_bytes: memory.peak,
            samples_per_s: shared.samples_per_s,
            time,
        }
    }
}

/// Which process this is.
#[derive(Debug)]
struct Place {
    rank: usize,
    host: String,
    pid: u32,
}

impl Place {
    fn new(rank: usize) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { rank, host, pid: std::process::id() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_names_that_readers_know() {
        let status = Status::default();
        status.op(Some("all_reduce(8 f32, sum) #1 at a.rs:9".into()));
        let Ok(serde_json::Value::Object(file)) = serde_json::to_value(status.now(&Place::new(3))) else {
            panic!("no object")
        };
        let mut names: Vec<_> = file.keys().map(String::as_str).collect();
        names.sort_unstable();
        let expected = "comm_s compute_s epoch error host load_s memory_bytes op op_s peak_bytes pid rank \
                        samples_per_s state step time";
        assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
        assert_eq!((&file["state"], &file["error"]), (&"running".into(), &serde_json::Value::Null));
        assert!(file["memory_bytes"].as_u64() > Some(100_000) && file["pid"] == std::process::id());
    }

    #[test]
    fn what_is_told_of_a_collective_comes_before_what_is_asked() {
        let (status, place) = (Status::default(), Place::new(0));
        assert_eq!(status.now(&place).op, None);
        status.op_from(|| Some(("asked".into(), Duration::from_secs(2))));
        assert_eq!((status.now(&place).op.as_deref(), status.now(&place).op_s), (Some("asked"), 2.0));
        status.op(Some("told".into()));
        assert_eq!(status.now(&place).op.as_deref(), Some("told"));
        status.op(None);
        assert_eq!(status.now(&place).op.as_deref(), Some("asked"));
    }

    #[test]
    fn a_rank_is_lost_when_it_is_silent_and_has_not_ended() {
        let silent = RankStatus { time: 100.0, ..RankStatus::default() };
        assert!(!silent.is_lost(104.9) && silent.is_lost(105.1));
        for state in [State::Ended, State::Failed] {
            assert!(!RankStatus { state, ..silent.clone() }.is_lost(200.0));
        }
    }
}
