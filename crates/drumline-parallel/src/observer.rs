//! Observers of the reductions of a step, such as for a timeline.
//!
//! ```text
//!   backward      ▕████████████████████████████▏
//!   lane                 ▕bucket 0▏▕bucket 1▏▕bucket 2▏
//!   reported                       ▲         ▲        ▲  bucket_reduced
//!   waiting                                    ▕██████▏  waited: what was not hidden behind backward
//! ```

use std::sync::Arc;
use std::time::Instant;

/// Observes the reductions of a step. It is called in the middle of a step, and so must be fast.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::{Duration, Instant};
/// use drumline_parallel::{ReductionObserver, DdpOptions, ReducedBucket};
///
/// #[derive(Default)]
/// struct Waiting(Mutex<Duration>);
///
/// impl ReductionObserver for Waiting {
///     fn bucket_reduced(&self, _: ReducedBucket) {}
///     fn waited(&self, begin: Instant, end: Instant) {
///         *self.0.lock().unwrap() += end - begin;
///     }
/// }
///
/// let waiting = Arc::new(Waiting::default());
/// let options = DdpOptions { observer: Some(waiting.clone()), ..DdpOptions::default() };
/// # drop(options);
/// ```
pub trait ReductionObserver: Send + Sync {
    /// A bucket was reduced. Called on the thread that reduces.
    fn bucket_reduced(&self, bucket: ReducedBucket);

    /// Backward had ended, and this rank waited for the remaining reductions.
    fn waited(&self, begin: Instant, end: Instant);
}

/// A bucket, and the time of its reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReducedBucket {
    /// Its index in the order of reduction.
    pub index: usize,
    /// Its size in bytes.
    pub bytes: usize,
    /// When this rank began to reduce it.
    pub begin: Instant,
    /// When the reduction was done.
    pub end: Instant,
}

/// The observer, if there is one. Without one not even the clock is read.
#[derive(Clone, Default)]
pub(crate) struct Watch(pub(crate) Option<Arc<dyn ReductionObserver>>);

impl Watch {
    /// Runs `work`, and reports its begin and end.
    pub(crate) fn over<T>(
        &self,
        work: impl FnOnce() -> T,
        report: impl FnOnce(&dyn ReductionObserver, Instant, Instant),
    ) -> T {
        self.by(Instant::now, work, report)
    }

    fn by<T>(
        &self,
        clock: impl Fn() -> Instant,
        work: impl FnOnce() -> T,
        report: impl FnOnce(&dyn ReductionObserver, Instant, Instant),
    ) -> T {
        let Some(observer) = &self.0 else { return work() };
        let begin = clock();
        let outcome = work();
        report(&**observer, begin, clock());
        outcome
    }
}

type Observer = Arc<dyn ReductionObserver>;

/// Forwards each call to two observers.
struct Both(Observer, Observer);

impl ReductionObserver for Both {
    fn bucket_reduced(&self, bucket: ReducedBucket) {
        self.0.bucket_reduced(bucket);
        self.1.bucket_reduced(bucket);
    }

    fn waited(&self, begin: Instant, end: Instant) {
        self.0.waited(begin, end);
        self.1.waited(begin, end);
    }
}

/// One observer for both.
pub(crate) fn both(one: Option<Observer>, other: Option<Observer>) -> Option<Observer> {
    match (one, other) {
        (Some(one), Some(other)) => Some(Arc::new(Both(one, other))),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Heard(Mutex<Vec<(Instant, Instant)>>);

    impl ReductionObserver for Heard {
        fn bucket_reduced(&self, _: ReducedBucket) {}
        fn waited(&self, begin: Instant, end: Instant) {
            self.0.lock().unwrap().push((begin, end));
        }
    }

    #[test]
    fn without_an_observer_not_even_the_clock_is_read() {
        let heard = Arc::new(Heard::default());
        for (watch, read) in [(Watch::default(), 0), (Watch(Some(heard.clone())), 2)] {
            let times = Cell::new(0);
            let clock = || {
                times.set(times.get() + 1);
                Instant::now()
            };
            let done = watch.by(clock, || 7, |observer, begin, end| observer.waited(begin, end));
            assert_eq!((done, times.get()), (7, read));
        }
        let heard = heard.0.lock().unwrap();
        assert!(heard.len() == 1 && heard[0].0 <= heard[0].1);
    }
}
