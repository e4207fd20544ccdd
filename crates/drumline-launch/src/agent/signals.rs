//! Turns the signals that the agent's process receives into events.

use std::io;
use std::sync::mpsc::Sender;

use rustix::process::Signal;
use signal_hook::iterator::Signals;

use super::AgentEvent;
use crate::plan::{LaunchPlan, PASSED_ON};

/// Whether this signal stops the job, instead of being only forwarded to the workers.
pub(super) fn asks_to_stop(plan: &LaunchPlan, signal: Signal) -> bool {
    plan.signals.contains(&signal) || !PASSED_ON.contains(&signal)
}

/// From now on, these `signals` and the forwarded ones ([`PASSED_ON`]) arrive as events.
pub(super) fn listen(signals: &[Signal], events: Sender<AgentEvent>) -> io::Result<()> {
    let numbers = signals.iter().chain(&PASSED_ON).map(|signal| signal.as_raw());
    let mut signals = Signals::new(numbers)?;
    std::thread::Builder::new().name("drumline-signals".to_string()).spawn(move || {
        for signal in signals.forever().filter_map(Signal::from_named_raw) {
            if events.send(AgentEvent::Signal(signal)).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}
