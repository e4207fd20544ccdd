//! Injects timed faults, such as `rank=1,after=30s,kill`, into programs that report no steps.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::fault::{Fault, FaultKind, When};
use rustix::process::Signal;

use crate::report::signal_name;
use crate::running::JobControl;

/// The thread that injects the faults. Dropping this stops and joins it.
pub(super) struct FaultInjector {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A signal for a rank, `after` the start of the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TimedSignal {
    after: Duration,
    rank: usize,
    signal: Signal,
    /// The fault that it belongs to.
    fault: Fault,
}

impl FaultInjector {
    /// Starts injecting `faults` into the workers of `control`. Without faults it starts no thread.
    pub(super) fn start(faults: &[Fault], control: &JobControl) -> FaultInjector {
        let signals = timed_signals(faults);
        let control = control.clone();
        if signals.is_empty() {
            return FaultInjector { stop: None, thread: None };
        }
        let (stop, stopped) = mpsc::channel();
        let inject = move || {
            let began = Instant::now();
            for (index, timed) in signals.iter().enumerate() {
                let left = (began + timed.after).saturating_duration_since(Instant::now());
                if stopped.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    let ended = format!("the ranks ended after {:.1} s", began.elapsed().as_secs_f64());
                    missed(&signals[index..])
                        .for_each(|fault| tracing::warn!("fault {fault} did not happen: {ended}"));
                    return;
                }
                let TimedSignal { rank, signal, fault, .. } = *timed;
                tracing::warn!("fault {fault}: {}", signal_name(signal.as_raw()));
                control.signal_rank(rank, signal);
            }
        };
        match std::thread::Builder::new().name("drumline-faults".to_string()).spawn(inject) {
            Ok(thread) => FaultInjector { stop: Some(stop), thread: Some(thread) },
            Err(error) => {
                tracing::warn!(%error, "cannot start the thread that injects faults; no fault will happen");
                FaultInjector { stop: None, thread: None }
            }
        }
    }
}

/// The faults of these signals, except those that have begun: a stop whose end is missing.
fn missed(left: &[TimedSignal]) -> impl Iterator<Item = Fault> {
    left.iter().filter(|timed| timed.signal != Signal::CONT).map(|timed| timed.fault)
}

/// The signals that the timed faults mean, in the order of their times.
fn timed_signals(faults: &[Fault]) -> Vec<TimedSignal> {
    let mut signals = Vec::new();
    for &fault in faults {
        let When::After(after) = fault.when else { continue };
        let mut push = |after, signal| signals.push(TimedSignal { after, rank: fault.rank, signal, fault });
        match fault.kind {
            FaultKind::Kill => push(after, Signal::KILL),
            FaultKind::Stop(time) => {
                push(after, Signal::STOP);
                time.into_iter().for_each(|time| push(after + time, Signal::CONT));
            }
            // The fault grammar does not allow other faults with `after`.
            _ => {}
        }
    }
    signals.sort_by_key(|timed| timed.after);
    signals
}

impl Drop for FaultInjector {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_rendezvous::fault::parse_faults;

    #[test]
    fn a_timed_stop_ends_and_signals_are_in_order() {
        let faults =
            parse_faults("rank=1,after=5s,kill; rank=0,after=1s,stop=2s; rank=0,step=3,kill").unwrap();
        let signals: Vec<_> = timed_signals(&faults)
            .iter()
            .map(|timed| (timed.after.as_secs(), timed.rank, timed.signal))
            .collect();
        assert_eq!(signals, [(1, 0, Signal::STOP), (3, 0, Signal::CONT), (5, 1, Signal::KILL)]);
    }

    #[test]
    fn a_stop_that_has_begun_is_not_missed() {
        let faults = parse_faults("rank=0,after=1s,stop=2s; rank=1,after=5s,kill").unwrap();
        let signals = timed_signals(&faults);
        let missed_after =
            |num_sent: usize| missed(&signals[num_sent..]).map(|fault| fault.rank).collect::<Vec<_>>();
        assert_eq!([missed_after(0), missed_after(1), missed_after(3)], [vec![0, 1], vec![1], vec![]]);
    }
}
