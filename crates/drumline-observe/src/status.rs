//! `OUT_DIR/ranks/00000.json`: what each rank is doing, for readers such as the page.
//!
//! ```text
//!   training ──step, add_load, op, …──▶ Status ◀──twice a second── StatusWriter ──temporary file, renamed──▶ ranks/00003.json
//! ```
//! The training sets numbers in memory; a thread writes them. A reader always sees a complete file. A rank that has not written
//! for [`LOST_AFTER`], and whose file does not say that it has ended, counts as lost: see [`LastSign`].

mod last_sign;
mod memory;
mod read;
mod writer;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::recent::Recent;

pub use last_sign::LastSign;
pub use memory::Memory;
pub use read::read;
pub(crate) use read::try_read;
pub use writer::{StatusError, StatusWriter};

/// Name of the folder in `OUT_DIR`.
pub const RANKS: &str = "ranks";

/// A rank that is silent for this long, and has not ended, is lost.
pub const LOST_AFTER: Duration = Duration::from_secs(5);

/// The content of a rank's file. A number that JSON does not have is read as 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankStatus {
    /// Its number.
    pub rank: usize,
    /// The machine that it runs on.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its place along the axes of the mesh that have several ranks, from 0, such as `pp 1/2, tp 0/2`; `None` if unknown.
    pub mesh: Option<String>,
    /// Whether it is working.
    pub state: State,
    /// What went wrong, if something did.
    pub error: Option<String>,
    /// Steps done.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// The collective that it is in, such as `all_reduce(1024 f32, sum) #12 of world at src/a.rs:91`.
    pub op: Option<String>,
    /// Seconds since it was first seen there: up to half a second less than the real time.
    #[serde(deserialize_with = "read::or_zero")]
    pub op_s: f64,
    /// Seconds that it has waited for data, since the run began.
    #[serde(deserialize_with = "read::or_zero")]
    pub load_s: f64,
    /// Seconds in forward, backward and the optimizer.
    #[serde(deserialize_with = "read::or_zero")]
    pub compute_s: f64,
    /// Seconds in which it waited for other ranks.
    #[serde(deserialize_with = "read::or_zero")]
    pub comm_s: f64,
    /// In a pipeline, the share of the last step's forwards and backwards, from 0 to 1, in which it computed nothing.
    pub bubble: Option<f64>,
    /// The ratio of its work to the median of the others, if it is slower than they are.
    pub slow: Option<f64>,
    /// Memory that it uses.
    pub memory_bytes: u64,
    /// The most that it has used.
    pub peak_bytes: u64,
    /// Its own samples per second, over the last steps.
    #[serde(deserialize_with = "read::or_zero")]
    pub samples_per_s: f64,
    /// When this was written: seconds since 1970.
    #[serde(deserialize_with = "read::or_zero")]
    pub time: f64,
}

/// Whether a rank is working.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is working.
    #[default]
    Running,
    /// It has finished, or was stopped.
    Ended,
    /// It has failed.
    Failed,
}

/// The handle through which the training reports what it does. Cheap to clone, and all clones are the same; a call takes about ten
/// nanoseconds.
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
    mesh: Option<String>,
    state: State,
    error: Option<String>,
    step: u64,
    epoch: u64,
    op_from: Option<Box<dyn OpSource>>,
    /// The collectives that were seen, and when each was first seen.
    ops: Vec<(Instant, String)>,
    load: Duration,
    compute: Duration,
    comm: Duration,
    throughput: Recent,
    bubble: Option<f64>,
    slow: Option<f64>,
}

/// A function that returns the collectives that a rank is in.
trait OpSource: Fn() -> Vec<String> + Send {}
impl<F: Fn() -> Vec<String> + Send> OpSource for F {}

impl Shared {
    /// The collective that the rank is in, and since when it was seen there; of several, the oldest.
    fn op(&mut self) -> Option<(String, Duration)> {
        let now = Instant::now();
        let known = std::mem::take(&mut self.ops);
        let since = |op: &str| known.iter().find(|(_, known)| known == op).map_or(now, |(since, _)| *since);
        let ops = self.op_from.as_ref().map_or_else(Vec::new, |source| source());
        let seen = |op: String| (since(&op), op);
        self.ops = ops.into_iter().map(seen).collect();
        let (since, op) = self.ops.iter().min_by_key(|(since, _)| *since)?;
        Some((op.clone(), now - *since))
    }
}

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
    /// Sets the number of steps that are done, and the epoch of the last one (from 0).
    pub fn step(&self, step: u64, epoch: u64) {
        let mut shared = self.lock();
        (shared.step, shared.epoch) = (step, epoch);
    }

    /// Adds a step with this many samples of this rank, at this rate per second. The file gets the rate of the last steps together,
    /// so that the smaller batch at the end of an epoch counts less.
    pub fn throughput(&self, samples: f64, per_s: f64) {
        self.lock().throughput.push(per_s, samples);
    }

    /// Adds time in which it waited for data.
    pub fn add_load(&self, time: Duration) {
        self.lock().load += time;
    }

    /// Adds time in forward, backward and the optimizer.
    pub fn add_compute(&self, time: Duration) {
        self.lock().compute += time;
    }

    /// Adds time in which it waited for other ranks.
    pub fn add_comm(&self, time: Duration) {
        self.lock().comm += time;
    }

    /// Sets its place in the mesh of ranks, such as `pp 1/2, tp 0/2`.
    pub fn mesh(&self, place: impl Into<String>) {
        self.lock().mesh = Some(place.into());
    }

    /// Sets the share of the last step, from 0 to 1, in which it computed nothing, if it is a rank of a pipeline.
    pub fn bubble(&self, share: Option<f64>) {
        self.lock().bubble = share;
    }

    /// Sets how many times longer its work of a step takes than that of the others, if it is slower.
    pub fn slow(&self, times: Option<f64>) {
        self.lock().slow = times;
    }

    /// Sets the function that is called each time the file is written, and returns the collectives that the rank is in. It costs
    /// nothing in between. Equal names mean the same collective, so each needs a unique name.
    pub fn op_from(&self, source: impl Fn() -> Vec<String> + Send + 'static) {
        self.lock().op_from = Some(Box::new(source));
    }

    /// The rank has finished. The function of [`op_from`](Self::op_from) is dropped.
    pub fn ended(&self) {
        self.end(State::Ended, None);
    }

    /// The rank has failed. The function of [`op_from`](Self::op_from) is dropped.
    pub fn failed(&self, error: impl Into<String>) {
        self.end(State::Failed, Some(error.into()));
    }

    fn end(&self, state: State, error: Option<String>) {
        let mut shared = self.lock();
        (shared.state, shared.error) = (state, error);
        let source = shared.op_from.take();
        // Dropping it may take time.
        drop(shared);
        drop(source);
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of the file now.
    fn now(&self, place: &Place) -> RankStatus {
        let Place { rank, host, pid } = place;
        let memory = Memory::of_this_process().unwrap_or_default();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let mut shared = self.lock();
        let (op, op_time) = shared.op().unzip();
        RankStatus {
            rank: *rank,
            host: host.clone(),
            pid: *pid,
            mesh: shared.mesh.clone(),
            state: shared.state,
            error: shared.error.clone(),
            step: shared.step,
            epoch: shared.epoch,
            op,
            op_s: op_time.unwrap_or_default().as_secs_f64(),
            load_s: shared.load.as_secs_f64(),
            compute_s: shared.compute.as_secs_f64(),
            comm_s: shared.comm.as_secs_f64(),
            bubble: shared.bubble,
            slow: shared.slow,
            memory_bytes: memory.used,
            peak_bytes: memory.peak,
            samples_per_s: shared.throughput.rate().unwrap_or(0.0),
            time,
        }
    }
}

/// The identity of this process.
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
        let Ok(serde_json::Value::Object(file)) = serde_json::to_value(status.now(&Place::new(3))) else {
            panic!("no object")
        };
        let mut names: Vec<_> = file.keys().map(String::as_str).collect();
        names.sort_unstable();
        let expected = "bubble comm_s compute_s epoch error host load_s memory_bytes mesh op op_s peak_bytes pid rank \
                        samples_per_s slow state step time";
        assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
        assert_eq!((&file["state"], &file["error"]), (&"running".into(), &serde_json::Value::Null));
        assert!(file["memory_bytes"].as_u64() > Some(100_000) && file["pid"] == std::process::id());
    }

    #[test]
    fn a_rank_of_a_pipeline_has_a_place_and_a_bubble() {
        let status = Status::default();
        let now = || status.now(&Place::new(3));
        assert_eq!((now().mesh, now().bubble), (None, None));
        status.mesh("pp 1/2, tp 1/2");
        status.bubble(Some(0.25));
        assert_eq!((now().mesh.as_deref(), now().bubble), (Some("pp 1/2, tp 1/2"), Some(0.25)));
    }

    #[test]
    fn a_collective_lasts_as_long_as_it_is_seen() {
        let (status, place) = (Status::default(), Place::new(0));
        let ops = Arc::new(Mutex::new(vec!["b #1".to_owned()]));
        let asked = ops.clone();
        status.op_from(move || asked.lock().unwrap().clone());
        assert_eq!((status.now(&place).op.as_deref(), status.now(&place).op_s > 0.0), (Some("b #1"), true));
        std::thread::sleep(Duration::from_millis(50));
        ops.lock().unwrap().insert(0, "a #7".to_owned());
        let now = status.now(&place);
        assert!(now.op.as_deref() == Some("b #1") && now.op_s >= 0.05, "the older of two: {now:?}");
        *ops.lock().unwrap() = vec!["b #2".to_owned()];
        assert_eq!((status.now(&place).op.as_deref(), Arc::strong_count(&ops)), (Some("b #2"), 2));
        status.ended();
        assert_eq!((status.now(&place).op, Arc::strong_count(&ops)), (None, 1), "the function was dropped");
    }
}
