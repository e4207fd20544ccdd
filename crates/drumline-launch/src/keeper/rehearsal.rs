//! Faults on purpose that the launcher carries out: `rank=1,after=30s,kill`, for programs that report no steps.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use drumline_rendezvous::fault::{Deed, Fault, When};
use rustix::process::Signal;

use crate::running::JobControl;

/// The thread that carries them out; ends with its owner.
pub(super) struct Rehearsal {
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A signal to a rank, so long after the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Act {
    after: Duration,
    rank: usize,
    signal: Signal,
    /// What it is part of.
    fault: Fault,
}

impl Rehearsal {
    /// Starts with the workers that `control` reaches. Without faults there is no thread.
    pub(super) fn start(faults: &[Fault], control: &JobControl) -> Rehearsal {
        let (acts, control) = (acts(faults), control.clone());
        if acts.is_empty() {
            return Rehearsal { over: None, thread: None };
        }
        let (over, is_over) = mpsc::channel();
        let play = move || {
            let began = Instant::now();
            for act in acts {
                let left = (began + act.after).saturating_duration_since(Instant::now());
                if is_over.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let Act { rank, signal, fault, .. } = act;
                tracing::warn!(rank, "fault {fault}: {signal:?}");
                control.signal_rank(rank, signal);
            }
        };
        match std::thread::Builder::new().name("drumline-faults".to_string()).spawn(play) {
            Ok(thread) => Rehearsal { over: Some(over), thread: Some(thread) },
            Err(error) => {
                tracing::warn!(%error, "no faults will happen: there is no thread for them");
                Rehearsal { over: None, thread: None }
            }
        }
    }
}

/// What is to be done, in the order of its time.
fn acts(faults: &[Fault]) -> Vec<Act> {
    let mut acts = Vec::new();
    for &fault in faults {
        let When::After(after) = fault.when else { continue };
        let mut act = |after, signal| acts.push(Act { after, rank: fault.rank, signal, fault });
        match fault.deed {
            Deed::Kill => act(after, Signal::KILL),
            Deed::Stop(time) => {
                act(after, Signal::STOP);
                time.into_iter().for_each(|time| act(after + time, Signal::CONT));
            }
            // The grammar lets nobody ask the launcher for these.
            _ => {}
        }
    }
    acts.sort_by_key(|act| act.after);
    acts
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        drop(self.over.take());
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
    fn a_stop_with_a_time_ends_and_all_is_in_order() {
        let faults =
            parse_faults("rank=1,after=5s,kill; rank=0,after=1s,stop=2s; rank=0,step=3,kill").unwrap();
        let acts: Vec<_> =
            acts(&faults).iter().map(|act| (act.after.as_secs(), act.rank, act.signal)).collect();
        assert_eq!(acts, [(1, 0, Signal::STOP), (3, 0, Signal::CONT), (5, 1, Signal::KILL)]);
    }
}
