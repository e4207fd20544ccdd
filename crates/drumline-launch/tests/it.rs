//! Jobs of real processes on this machine.
#![allow(clippy::unwrap_used)]

mod it {
    mod bars;
    mod console;
    mod failure_report;
    mod launched;
    mod logs;
    mod output;
    mod starting;
    mod stopping;
}
