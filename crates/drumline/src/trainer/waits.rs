//! How long this rank waits for the others in a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use drumline_parallel::{ReducedBucket, ReductionObserver};

/// Sums the times of waiting for reductions, and forwards what it observes.
pub(super) struct Waits {
    nanoseconds: AtomicU64,
    next: Option<Arc<dyn ReductionObserver>>,
}

impl Waits {
    pub(super) fn new(next: Option<Arc<dyn ReductionObserver>>) -> Self {
        Self { nanoseconds: AtomicU64::new(0), next }
    }

    /// The time waited since the last call.
    pub(super) fn take(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.swap(0, Ordering::Relaxed))
    }

    /// Runs `wait`, and adds its time.
    pub(super) fn over<T>(&self, wait: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let outcome = wait();
        self.add(begin.elapsed());
        outcome
    }

    /// Adds a time of waiting.
    pub(super) fn add(&self, time: Duration) {
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl ReductionObserver for Waits {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        if let Some(next) = &self.next {
            next.bucket_reduced(bucket);
        }
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.add(end.saturating_duration_since(begin));
        if let Some(next) = &self.next {
            next.waited(begin, end);
        }
    }
}
