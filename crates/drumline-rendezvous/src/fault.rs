//! Fault injection: what a rank does to itself at a given step, so that users can test how their job reacts.
//!
//! ```text
//!   rank=1,step=20,kill            rank 1 kills itself with SIGKILL at step 20
//!   rank=0,step=5,stop=10s         stops itself (SIGSTOP) for ten seconds; without a time, forever
//!   rank=2,step=7,exit=3           exits with code 3, without unwinding
//!   rank=1,step=3,panic            panics
//!   rank=1,step=3,sleep=250ms      sleeps once
//!   rank=3,step=10,slow=2          from step 10 on, each of its steps takes twice as long
//!   rank=0,step=4,drop=1           breaks the TCP connections of collectives to rank 1
//!   rank=0,step=4,delay=50ms,peer=1    from step 4 on, delays what it sends to rank 1 in collectives by 50 ms
//!   rank=1,after=30s,kill          30 s after its start, by the launcher, for programs that report no steps
//! ```
//! Several faults are joined by `;`. By default a fault happens only before the first restart, so that a job that
//! resumes does not meet it again. `restart=2` is for the run after the second restart, `restart=any` for every run.
//!
//! Here: the grammar, and [`Faults`], which a training loop calls at each step. Not here: `after`, which the launcher
//! injects, and links, which belong to the group.

mod grammar;
mod point;

pub use grammar::{Fault, FaultError, FaultKind, Restarts, When, parse_faults};
pub use point::{Faults, LinkFault};
