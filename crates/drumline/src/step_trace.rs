//! A trace of steps: this rank's computation, the reduction of each bucket beside it, and waiting.
//!
//! ```text
//!   compute        ▕ forward ▏▕       backward     ▕wait▏▏▕ optimizer ▏
//!   communication               ▕bucket 0▏▕  bucket 1  ▏
//! ```
//! The part of a reduction below `wait` was not hidden behind backward.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use drumline_observe::trace::{Span, Trace, TraceError, Track, file_of};
use drumline_parallel::{ReducedBucket, ReductionObserver};

/// Whether a [`StepTrace`] records spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// It records every span.
    On,
    /// It records nothing, between the steps of interest.
    Off,
}

/// Collects the spans of a rank. [`Ddp`](crate::Ddp) reports buckets, the program the rest.
///
/// ```no_run
/// use drumline::{Ddp, DdpOptions, ProcessGroup, tch};
/// use drumline::engine::StepTrace;
/// use tch::{Device, Kind, Tensor, nn};
///
/// let group = ProcessGroup::from_env()?;
/// let trace = StepTrace::new(group.rank());
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 10, 1, Default::default());
/// let model = Ddp::new(model, &vs, &group, DdpOptions { observer: Some(trace.clone()), ..Default::default() })?;
/// let x = Tensor::rand([32, 10], (Kind::Float, Device::Cpu));
/// let loss = trace.over("forward", || model.forward(&x))?.mean(Kind::Float);
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
    /// A trace without spans, which records.
    pub fn new(rank: usize) -> Arc<Self> {
        Arc::new(Self { rank, is_off: AtomicBool::new(false), trace: Mutex::new(Trace::new(rank)) })
    }

    /// Turns recording on or off. At first it is on.
    pub fn set(&self, recording: Recording) {
        self.is_off.store(recording == Recording::Off, Ordering::Relaxed);
    }

    /// Runs some computation, and records it as a span.
    pub fn over<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let outcome = work();
        self.span(name, Track::Compute, begin, Instant::now());
        outcome
    }

    /// Records a span, such as the loading of a batch.
    pub fn span(&self, name: &str, track: Track, begin: Instant, end: Instant) {
        if self.is_recording() {
            self.add(Span::new(name, track, [begin, end]));
        }
    }

    /// Writes the rank's file, `trace/rank-NNNNN.json` in the folder of the run.
    pub fn write(&self, out_dir: &Path) -> Result<(), TraceError> {
        self.lock().write(&file_of(out_dir, self.rank))
    }

    /// Removes all spans.
    pub fn clear(&self) {
        *self.lock() = Trace::new(self.rank);
    }

    /// Records a span with what a viewer shows of it, unless recording is off.
    pub(crate) fn add(&self, span: Span) {
        if self.is_recording() {
            self.lock().add(span);
        }
    }

    /// Whether it records now.
    pub(crate) fn is_recording(&self) -> bool {
        !self.is_off.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Trace> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReductionObserver for StepTrace {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        if self.is_recording() {
            let ReducedBucket { index, bytes, begin, end } = bucket;
            let span = Span::new(format!("bucket {index}"), Track::Communication, [begin, end]);
            self.add(span.arg("bytes", bytes));
        }
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.span("wait", Track::Compute, begin, end);
    }
}
