//! Who wants to know when the buckets of a step are reduced, such as to draw it.
//!
//! ```text
//!   backward      ▕████████████████████████████▏
//!   lane                 ▕bucket 0▏▕bucket 1▏▕bucket 2▏
//!   told                           ▲         ▲        ▲  bucket_reduced
//!   waiting                                    ▕██████▏  waited: what was not hidden behind backward
//! ```

use std::sync::Arc;
use std::time::Instant;

/// Hears of a step's reductions. Called in the midst of a step: what takes long here makes the step long.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::{Duration, Instant};
/// use drumline_parallel::{DdpObserver, DdpOptions, ReducedBucket};
///
/// #[derive(Default)]
/// struct Waiting(Mutex<Duration>);
///
/// impl DdpObserver for Waiting {
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
pub trait DdpObserver: Send + Sync {
    /// A bucket was reduced, on a thread of its own beside backward.
    fn bucket_reduced(&self, bucket: ReducedBucket);

    /// Backward was over, and this rank waited for the reductions that were not.
    fn waited(&self, begin: Instant, end: Instant);
}

/// A bucket, and when it was reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReducedBucket {
    /// Its number, in the order of reduction.
    pub index: usize,
    /// Its bytes.
    pub bytes: usize,
    /// When this rank began with it.
    pub begin: Instant,
    /// When it had the mean of all ranks.
    pub end: Instant,
}

/// The observer, if there is one. Without one not even the clock is read.
#[derive(Clone, Default)]
pub(super) struct Watch(pub(super) Option<Arc<dyn DdpObserver>>);

impl Watch {
    /// Does `work`, and tells when it was done.
    pub(super) fn over<T>(
        &self,
        work: impl FnOnce() -> T,
        tell: impl FnOnce(&dyn DdpObserver, Instant, Instant),
    ) -> T {
        self.by(Instant::now, work, tell)
    }

    fn by<T>(
        &self,
        clock: impl Fn() -> Instant,
        work: impl FnOnce() -> T,
        tell: impl FnOnce(&dyn DdpObserver, Instant, Instant),
    ) -> T {
        let Some(observer) = &self.0 else { return work() };
        let begin = clock();
        let outcome = work();
        tell(&**observer, begin, clock());
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Heard(Mutex<Vec<(Instant, Instant)>>);

    impl DdpObserver for Heard {
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
