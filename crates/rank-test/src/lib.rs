//! Tests that run as N real processes, with fault injection.
//!
//! ```text
//!   #[test] ─▶ Ranks ─start─▶ this test binary, N times (`drumline-launch`) ─▶ the body, as RANK 0 … N-1
//!     │                            ▲ kill, stop, wait for a line                     │
//!     └── result: every rank's exit and output ◀─────────────────────────────────────┘
//! ```
//!
//! Start with [`ranks_test!`].
#![forbid(unsafe_code)]

pub mod fault;
mod in_rank;
pub mod leftovers;
pub mod netns;
mod placement;
mod ranks;
mod ranks_test;
mod running;
pub mod slurm;
pub mod sshd;
#[cfg(feature = "nccl-stand-in")]
mod stand_in;
mod tools;

pub use anyhow;
pub use drumline_launch::{Exit, JobReport, RankReport, Signal};
pub use ranks::{DEFAULT_TIMEOUT, Ranks};
pub use ranks_test::run_test;
pub use running::RunningRanks;
#[cfg(feature = "nccl-stand-in")]
pub use stand_in::StandIn;
pub use tools::{REQUIRE_ALL, python_with_tensorboard, python_with_torch, require_tool, skipped};

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
