//! The speed of steps, and how long the rest will take.

use std::time::{Duration, Instant};

/// Measures the steps of an epoch.
#[derive(Debug, Clone)]
pub struct Pace {
    begin: Instant,
    last: Instant,
    steps: u32,
    samples: u64,
    rate: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

impl Pace {
    /// The first step begins now.
    pub fn new() -> Self {
        Self::from(Instant::now())
    }

    /// A step with this many samples is done, and the next begins.
    pub fn step(&mut self, samples: u64) {
        self.step_at(samples, Instant::now());
    }

    /// Samples per second of the last step.
    pub fn last(&self) -> f64 {
        self.rate
    }

    /// Samples per second since the beginning.
    pub fn mean(&self) -> f64 {
        rate(self.samples, self.last - self.begin)
    }

    /// The time that this many more steps will take.
    pub fn left(&self, steps: u64) -> Duration {
        let mean_step = (self.last - self.begin) / self.steps.max(1);
        mean_step.saturating_mul(steps.min(u32::MAX as u64) as u32)
    }

    fn from(now: Instant) -> Self {
        Self { begin: now, last: now, steps: 0, samples: 0, rate: 0.0 }
    }

    fn step_at(&mut self, samples: u64, now: Instant) {
        self.rate = rate(samples, now - self.last);
        self.last = now;
        self.steps += 1;
        self.samples += samples;
    }
}

fn rate(samples: u64, time: Duration) -> f64 {
    samples as f64 / time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_step_and_the_mean_are_different() {
        let begin = Instant::now();
        let mut pace = Pace::from(begin);
        pace.step_at(60, begin + Duration::from_secs(1));
        pace.step_at(60, begin + Duration::from_secs(4));
        assert_eq!((pace.last(), pace.mean()), (20.0, 30.0));
        assert_eq!(pace.left(10), Duration::from_secs(20));
        assert_eq!(Pace::new().left(10), Duration::ZERO, "nothing is known yet");
    }
}
