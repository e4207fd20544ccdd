//! Faults that a rank injects into itself when it reaches a given step.
//!
//! The test sets them with [`Ranks::fault`](crate::Ranks::fault), in the grammar of `drumline run --fault`
//! ([`drumline_rendezvous::fault`]), such as `rank=2,step=5,kill`, several joined by `;`. The body calls [`point`] at
//! each step. Without a fault for this rank and step it does nothing, which is the control of every such test.

use drumline_rendezvous::fault::Faults;
pub use drumline_rendezvous::fault::{Fault, FaultKind, Restarts, When};

/// A point where a fault may happen: the body calls it at each of its steps.
pub fn point(step: u64) {
    let mut faults = Faults::from_env().unwrap_or_else(|error| panic!("{error}"));
    let links = faults.at(step);
    assert!(links.is_empty(), "faults of links belong to the group, got {links:?}");
}
