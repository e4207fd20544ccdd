//! Faults on purpose: what a rank does to itself at a given step, so that people can rehearse what they fear.
//!
//! ```text
//!   rank=1,step=20,kill            rank 1 dies of SIGKILL when it comes to step 20
//!   rank=0,step=5,stop=10s         stands still (SIGSTOP) for ten seconds; without a time, for good
//!   rank=2,step=7,exit=3           exits with code 3, without unwinding
//!   rank=1,step=3,panic            panics
//!   rank=1,step=3,sleep=250ms      sleeps once
//!   rank=3,step=10,slow=2          from step 10 on, each of its steps takes twice as long
//!   rank=0,step=4,drop=1           breaks the TCP connections of collectives to rank 1
//!   rank=0,step=4,delay=50ms,peer=1    from step 4 on, holds back by 50 ms what it sends to rank 1 in collectives
//!   rank=1,after=30s,kill          30 s after its start, by the launcher: for programs that report no steps
//! ```
//! Several are joined by `;`. A fault happens before the first restart, so that a job which resumes does not meet it
//! again; `restart=2` is for the run after the second restart, `restart=any` for each.
//!
//! Here: the grammar, and [`Faults`], which a training loop asks at each step. Not here: `after`, which the launcher
//! carries out, and links, which are the group's.

mod grammar;
mod point;

pub use grammar::{Deed, Fault, FaultError, Restarts, When, parse_faults};
pub use point::{Faults, LinkFault};
