//! Leads the agents of other hosts: starts them, passes signals on to them, and ends when their job ends.

use drumline_launch::{Fleet, LaunchPlan, Leader, PASSED_ON, Signal, Site};
use drumline_rendezvous::JobKey;
use signal_hook::iterator::Signals;

use crate::errors::{ExitCodeOnly, print_line};

/// Runs the plan on the hosts of `fleet`; an error if the job failed.
pub(super) fn lead(plan: &LaunchPlan, fleet: &Fleet, site: &Site) -> anyhow::Result<()> {
    // Before anything is started: a signal at this moment must not leave half of the agents behind.
    let mut signals = Signals::new(plan.signals.iter().chain(&PASSED_ON).map(|signal| signal.as_raw()))?;
    let leader = Leader::start(&fleet.commands(plan, site), &JobKey::random(), plan.shutdown_timeout)?;
    let (agents, ending) = (leader.handle(), signals.handle());
    let stopping = plan.signals.clone();
    let listening =
        std::thread::Builder::new().name("drumline-signals".to_string()).spawn(move || {
            let known = signals.forever().filter_map(Signal::from_named_raw);
            known.for_each(|signal| {
                if stopping.contains(&signal) { agents.stop(signal) } else { agents.pass_on(signal) }
            });
        })?;
    let end = leader.wait();
    ending.close();
    // The thread does not panic, and nothing depends on it any more.
    let _ = listening.join();
    for problem in &end.problems {
        print_line(&format!("error: {problem}"));
    }
    match u8::try_from(end.code) {
        Ok(0) => Ok(()),
        Ok(code) => Err(ExitCodeOnly(code).into()),
        Err(_) => Err(ExitCodeOnly(1).into()),
    }
}
