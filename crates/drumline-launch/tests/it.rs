//! Jobs of real processes on this machine.
#![allow(clippy::unwrap_used)]

mod it {
    mod failure_report;
    mod output;
    mod starting;
    mod stopping;
}
