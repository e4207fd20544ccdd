//! A trace of steps: what this rank computes, each bucket's reduction beside it, and what it waits for.
//!
//! ```text
//!   compute        ▕ forward ▏▕       backward     ▕wait▏▏▕ optimizer ▏
//!   communication               ▕bucket 0▏▕  bucket 1  ▏
//! ```
//! What is seen of a reduction below `wait` was not hidden behind backward.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use drumline_observe::trace::{Trace, TraceError, Track, file_of};
use drumline_parallel::{DdpObserver, ReducedBucket};

/// What a [`StepTrace`] keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noting {
    /// Every span.
    All,
    /// No span: between the steps that are looked at.
    Nothing,
}

/// Collects the spans of a rank; [`Ddp`](crate::Ddp) tells it of buckets, the program of the rest.
///
/// ```no_run
/// use drumline::{Ddp, DdpOptions, ProcessGroup, StepTrace, tch};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let group = ProcessGroup::from_env()?;
/// let trace = StepTrace::new(group.rank());
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 10, 1, Default::default());
/// let model = Ddp::new(model, &vs, &group, DdpOptions { observer: Some(trace.clone()), ..Default::default() })?;
/// let loss = trace.over("forward", || model.forward(&Tensor::rand([32, 10], (Kind::Float, Device::Cpu))))?.mean(Kind::Float);
/// trace.over("backward", || model.backward(&loss))?;
/// trace.write("exp/a".as_ref())?; // exp/a/trace/rank-00000.json, for ui.perfetto.dev
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StepTrace {
    rank: usize,
    is_off: AtomicBool,
    trace: Mutex<Trace>,
}

impl StepTrace {
    /// Without spans yet.
    pub fn new(rank: usize) -> Arc<Self> {
        Arc::new(Self { rank, is_off: AtomicBool::new(false), trace: Mutex::new(Trace::new(rank)) })
    }

    /// What is noted from now on; all, at first.
    pub fn set(&self, noting: Noting) {
        self.is_off.store(noting == Noting::Nothing, Ordering::Relaxed);
    }

    /// Does some computing, and notes when.
    pub fn over<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let outcome = work();
        self.span(name, Track::Compute, begin, Instant::now());
        outcome
    }

    /// Notes what was done, such as the loading of a batch.
    pub fn span(&self, name: &str, track: Track, begin: Instant, end: Instant) {
        self.note((name, track), (begin, end), &[]);
    }

    /// Writes the rank's file, `trace/rank-NNNNN.json` in the folder of the run.
    pub fn write(&self, out_dir: &Path) -> Result<(), TraceError> {
        self.lock().write(&file_of(out_dir, self.rank))
    }

    /// Forgets all spans.
    pub fn clear(&self) {
        *self.lock() = Trace::new(self.rank);
    }

    fn note(
        &self,
        (name, track): (&str, Track),
        (begin, end): (Instant, Instant),
        args: &[(&str, serde_json::Value)],
    ) {
        if !self.is_off() {
            self.lock().span(name, track, begin, end, args);
        }
    }

    fn is_off(&self) -> bool {
        self.is_off.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Trace> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DdpObserver for StepTrace {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        if self.is_off() {
            return;
        }
        let ReducedBucket { index, bytes, begin, end } = bucket;
        let args = [("bytes", bytes.into())];
        self.note((&format!("bucket {index}"), Track::Communication), (begin, end), &args);
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.span("wait", Track::Compute, begin, end);
    }
}
