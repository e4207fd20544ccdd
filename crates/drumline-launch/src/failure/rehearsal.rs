//! Finds the fault of `--fault` that a rank had, so that a rehearsal is not taken for a failure.
//!
//! A rank prints a fault of a step before it injects it. A fault of a time is the launcher's: it has happened if the
//! rank ended later.

use drumline_rendezvous::fault::{Fault, FaultKind, When};

use super::ABORT;
use crate::report::{Exit, RankReport};

/// SIGKILL's number.
const KILL: i32 = 9;

/// The last fault that this rank had. `lines` are those of its stderr, `timed` the faults that the launcher injects.
pub(super) fn fault_of(report: &RankReport, lines: &[String], timed: &[Fault]) -> Option<Fault> {
    let is_own = |fault: &Fault| fault.rank == report.rank;
    let has_come = |fault: &Fault| matches!(fault.when, When::After(time) if time <= report.ended_after);
    let of_step = lines.iter().rev().find_map(|line| Fault::announced_by(line).filter(is_own));
    let of_time = || timed.iter().copied().filter(is_own).rfind(has_come);
    of_step.or_else(of_time)
}

/// Whether a rank with this fault ends so.
pub(super) fn explains(fault: &Fault, exit: Exit) -> bool {
    match (fault.kind, exit) {
        (FaultKind::Kill, Exit::Signal(KILL)) => true,
        // The system keeps the lowest byte of the code.
        (FaultKind::Exit(code), Exit::Code(ended)) => ended == code & 0xff,
        (FaultKind::Panic, Exit::Code(_) | Exit::Signal(ABORT)) => true,
        _ => false,
    }
}

/// Whether a rank with this fault waits for someone to continue it, while the others wait for it.
pub(super) fn is_frozen(fault: &Fault) -> bool {
    matches!(fault.kind, FaultKind::Stop(_))
}
