//! The signals that an agent is sent, as events.

use std::io;
use std::sync::mpsc::Sender;

use rustix::process::Signal;
use signal_hook::iterator::Signals;

use super::Happening;
use crate::plan::LaunchPlan;

pub(super) use crate::plan::PASSED_ON;

/// Whether this signal stops the job, and is not only handed on.
pub(super) fn asks_to_stop(plan: &LaunchPlan, signal: Signal) -> bool {
    plan.signals.contains(&signal) || !PASSED_ON.contains(&signal)
}

/// From now on these `signals`, and those that are passed on, are events.
pub(super) fn listen(signals: &[Signal], events: Sender<Happening>) -> io::Result<()> {
    let numbers = signals.iter().chain(&PASSED_ON).map(|signal| signal.as_raw());
    let mut signals = Signals::new(numbers)?;
    std::thread::Builder::new().name("drumline-signals".to_string()).spawn(move || {
        for signal in signals.forever().filter_map(Signal::from_named_raw) {
            if events.send(Happening::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}
