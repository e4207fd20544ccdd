//! Starts this node's workers and keeps them alive.
//!
//! ```text
//!   LaunchPlan ─▶ agent (meets the other nodes, decides by `membership`) ─▶ keeper, one process a round ─┐
//!   LocalJob (N ranks of one program, inside a program) ───────────────────────────────────────────────┴▶ supervisor
//!                                        supervisor ─▶ workers: sees each end at once, stops the others ─▶ JobReport
//!   Fleet ─▶ leader: starts agents on other hosts, which are `led`
//! ```
//!
//! Promises: the first failure stops the others within a bounded time; the death of the launcher, even by SIGKILL,
//! is the death of its workers; nothing it did not start is ever signalled.
//!
//! Not here: what the workers say to each other (`drumline-rendezvous`, `drumline-comm`).

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
