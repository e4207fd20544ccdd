//! How long a run has worked, and how long it will: from the times of its events.
//!
//! ```text
//!   run ─ step ─ step ─ eval ─ step      (stopped, or in a queue)      run ─ step ─ step
//!   ◀──────── work ──────────▶           ◀──── does not count ────▶    ◀──── work ────▶
//! ```
//! Only the clock of the machine that wrote the events counts: ours may differ.

/// The times of a run's events, in seconds since 1970.
#[derive(Debug, Default)]
pub(super) struct Clock {
    began: Option<f64>,
    last: Option<f64>,
    /// Seconds between one process of the run and the next.
    idle: f64,
    /// The first and the last step of this process.
    steps: Option<(At, At)>,
}

#[derive(Debug, Clone, Copy)]
struct At {
    step: u64,
    time: f64,
}

impl Clock {
    /// A process starts to work on the run.
    pub(super) fn begin(&mut self, time: f64) {
        self.steps = None;
        if time > 0.0 {
            self.idle += self.last.map_or(0.0, |last| (time - last).max(0.0));
            self.began.get_or_insert(time);
        }
    }

    /// Records the time of an event; returns the seconds of work until then.
    pub(super) fn record(&mut self, time: Option<f64>) -> Option<f64> {
        let time = time.filter(|time| time.is_finite() && *time > 0.0)?;
        let began = *self.began.get_or_insert(time);
        self.last = Some(self.last.map_or(time, |last| last.max(time)));
        Some((time - began - self.idle).max(0.0))
    }

    /// The same for a step.
    pub(super) fn record_step(&mut self, step: u64, time: Option<f64>) -> Option<f64> {
        let work = self.record(time)?;
        let at = At { step, time: time? };
        self.steps = Some((self.steps.map_or(at, |(first, _)| first), at));
        Some(work)
    }

    /// Seconds of work so far.
    pub(super) fn elapsed(&self) -> Option<f64> {
        Some((self.last? - self.began? - self.idle).max(0.0))
    }

    /// Seconds that this many more steps will take, from all that this process did since its first step: evaluations and
    /// checkpoints count, since they will come again.
    pub(super) fn left(&self, steps: u64) -> Option<f64> {
        let (first, last) = self.steps?;
        let done = last.step.checked_sub(first.step).filter(|done| *done > 0)?;
        Some((last.time - first.time).max(0.0) / done as f64 * steps as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_between_two_processes_does_not_count() {
        let mut clock = Clock::default();
        clock.begin(1000.0);
        assert_eq!(clock.record_step(1, Some(1010.0)), Some(10.0));
        assert_eq!(clock.record(Some(1020.0)), Some(20.0));
        clock.begin(9000.0);
        assert_eq!(clock.record_step(2, Some(9005.0)), Some(25.0));
        assert_eq!(clock.elapsed(), Some(25.0));
    }

    #[test]
    fn the_rest_is_estimated_from_all_steps_of_this_process() {
        let mut clock = Clock::default();
        clock.begin(1000.0);
        clock.record_step(1, Some(1100.0));
        assert_eq!(clock.left(10), None, "one step may have been slow for its own reasons");
        for step in 2..=10 {
            clock.record_step(step, Some(1100.0 + step as f64));
        }
        // The last batch, and an evaluation before it.
        clock.record_step(11, Some(1120.0));
        assert_eq!(clock.left(5), Some(10.0));
        clock.begin(2000.0);
        assert_eq!(clock.left(5), None, "another process, perhaps on other machines");
    }

    #[test]
    fn events_without_times_give_no_estimate() {
        let mut clock = Clock::default();
        clock.begin(0.0);
        assert_eq!(
            (clock.record_step(1, None), clock.record(Some(0.0)), clock.elapsed()),
            (None, None, None)
        );
        assert_eq!(clock.record(Some(500.0)), Some(0.0), "metrics alone begin with their first event");
        assert_eq!(clock.record(Some(400.0)), Some(0.0), "a clock that was set back");
        assert_eq!(clock.elapsed(), Some(0.0));
    }
}
