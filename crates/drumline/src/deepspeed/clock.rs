//! `wall_clock_breakdown`: how long forward, backward and step take.
//!
//! A GPU works behind the program, so that its work is awaited before and after each phase. That costs speed; without
//! the key nothing is measured.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tch::{Cuda, Device};

/// A phase of a step.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    Forward,
    Backward,
    Step,
}

/// Times of steps, each with all of its micro-batches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StepTimes {
    pub(super) forward: Duration,
    pub(super) backward: Duration,
    pub(super) step: Duration,
}

impl StepTimes {
    fn of(&mut self, phase: Phase) -> &mut Duration {
        match phase {
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
            Phase::Step => &mut self.step,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            backward: self.backward + other.backward,
            step: self.step + other.step,
        }
    }

    /// The names of DeepSpeed's figures, with milliseconds.
    pub(super) fn figures(self) -> [(&'static str, f64); 3] {
        [
            ("Train/Samples/elapsed_time_ms_forward", milliseconds(self.forward)),
            ("Train/Samples/elapsed_time_ms_backward", milliseconds(self.backward)),
            ("Train/Samples/elapsed_time_ms_step", milliseconds(self.step)),
        ]
    }
}

/// Measures the phases of steps, if it is wanted.
#[derive(Debug)]
pub(super) struct WallClock {
    /// The device whose work is awaited; `None` if nothing is measured.
    device: Option<Device>,
    /// This step so far.
    current: Cell<StepTimes>,
    /// The steps since the last line, without this one, and their number.
    sum: Cell<(StepTimes, u32)>,
}

impl WallClock {
    pub(super) fn new(is_on: bool, device: Device) -> Self {
        Self { device: is_on.then_some(device), current: Cell::default(), sum: Cell::default() }
    }

    /// Runs `body` as a part of a phase.
    pub(super) fn over<R>(&self, phase: Phase, body: impl FnOnce() -> R) -> R {
        let begin = self.begin();
        let result = body();
        self.end(phase, begin);
        result
    }

    /// Begins a part of a phase; `None` if nothing is measured.
    pub(super) fn begin(&self) -> Option<Instant> {
        self.device.map(|device| {
            await_work(device);
            Instant::now()
        })
    }

    /// Ends what [`begin`](Self::begin) began.
    pub(super) fn end(&self, phase: Phase, begin: Option<Instant>) {
        let Some((device, begin)) = self.device.zip(begin) else { return };
        await_work(device);
        let mut times = self.current.get();
        *times.of(phase) += begin.elapsed();
        self.current.set(times);
    }

    /// Ends a step; its times, if it was measured.
    pub(super) fn end_step(&self) -> Option<StepTimes> {
        self.device?;
        let (sum, num) = self.sum.get();
        let times = self.current.take();
        self.sum.set((sum.plus(times), num + 1));
        Some(times)
    }

    /// The mean of the steps since the last call as a line in DeepSpeed's words; `None` without steps.
    pub(super) fn line(&self) -> Option<String> {
        let (sum, num) = self.sum.take();
        let mean = |time: Duration| milliseconds(time) / f64::from(num);
        let StepTimes { forward, backward, step } = sum;
        let of = if num == 1 { String::new() } else { format!(" | mean of {num} steps") };
        let [forward, backward, step] = [mean(forward), mean(backward), mean(step)];
        (num > 0).then(|| format!("time (ms) | fwd: {forward:.2} | bwd: {backward:.2} | step: {step:.2}{of}"))
    }
}

fn await_work(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;

    #[test]
    fn phases_add_up_to_a_step() {
        let clock = WallClock::new(true, Device::Cpu);
        let pause = || sleep(Duration::from_millis(2));
        for _ in 0..2 {
            for phase in [Phase::Forward, Phase::Forward, Phase::Step] {
                clock.over(phase, pause);
            }
            let times = clock.end_step().unwrap();
            assert!(times.forward >= Duration::from_millis(4) && times.step >= Duration::from_millis(2));
            assert_eq!(times.backward, Duration::ZERO);
        }
        let line = clock.line().unwrap();
        assert!(line.starts_with("time (ms) | fwd: ") && line.contains(" | bwd: 0.00 | step: "), "{line}");
        assert!(line.ends_with(" | mean of 2 steps"), "{line}");
        assert_eq!(clock.line(), None, "there is no step since");
    }

    #[test]
    fn nothing_is_measured_without_the_key() {
        let clock = WallClock::new(false, Device::Cpu);
        assert_eq!(clock.over(Phase::Step, || 7), 7);
        assert_eq!((clock.end_step(), clock.line()), (None, None));
    }
}
