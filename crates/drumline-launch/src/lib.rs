//! Starts this node's workers and keeps them alive.
//!
//! ```text
//!   LaunchPlan ─▶ agent (joins the other nodes, follows `membership`) ─▶ keeper, one process per round ─┐
//!   LocalJob (N ranks of one program, started by a program) ────────────────────────────────────────────┴▶ supervisor
//!                                 supervisor ─▶ workers: notices each end at once, stops the others ─▶ JobReport
//!   Fleet ─▶ leader: starts agents on other hosts, which are `led`
//! ```
//!
//! Promises: the first failure stops the other workers within a bounded time. The death of the launcher, even by
//! SIGKILL, also ends its workers. The launcher never signals a process that it did not start.
//!
//! Not here: communication between workers (`drumline-rendezvous`, `drumline-comm`).

mod agent;
mod descriptors;
mod environment;
mod error;
mod failure;
mod fleet;
mod hosted_store;
mod keeper;
mod key_memory;
pub mod led;
mod lines;
mod local_job;
mod logs;
pub mod membership;
pub mod placing;
mod plan;
mod ports;
mod prepare;
mod pump;
mod random;
mod report;
mod running;
mod seconds;
pub mod shell;
mod spawn_advice;
mod stop;
mod streams;
mod supervise;
mod tail;
mod worker;

pub use agent::{AgentOptions, Outcome, run_agent};
pub use environment::{Environment, Meeting, Place, short_spins, worker_environment};
pub use error::LaunchError;
pub use failure::{
    Evidence, ExitCodes, Failure, FailureReport, LogPids, OomKill, OomSources, OomWatch, ProcessState,
    Standing, Trace, exit_code,
};
pub use fleet::{
    EnvFileError, FleetEnd, HostCommand, HostProblem, Leader, LeaderError, LeaderHandle, Order, OrderError,
    Site, is_exported, parse_env_file,
};
pub use keeper::keep;
pub use key_memory::KeyMemory;
pub use local_job::LocalJob;
pub use logs::{AttemptLogs, Bars, LineFilters, LogError, LogFolder, LogPlan, Std, StdOf, StdOfError};
pub use plan::{
    Contact, EndpointError, Fleet, HeldRank, HostSlots, HostTimeout, HostTimeoutError, HostfileError,
    LaunchPlan, LedBy, LocalRankArg, NodeRange, NodeRangeError, NumaBinding, PASSED_ON, Program, RdzvConf,
    RdzvConfError, Rendezvous, SignalsError, Starter, exclude_slots, include_slots, installed_gpus,
    parse_hostfile, parse_signals, split_endpoint, visible_gpus,
};
pub use pump::Output;
pub use report::{Exit, JobReport, RankReport, StopReason, signal_name};
pub use running::{RunOptions, RunningJob};
pub use rustix::process::Signal;
pub use seconds::{SecondsError, parse_seconds};
pub use stop::{OnFailure, StopPolicy};
pub use worker::WorkerSpec;

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
