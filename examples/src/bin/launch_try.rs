//! Shows what a launcher sets for its ranks, and what it does when one fails: the last rank fails once on purpose.
//!
//! ```text
//!   drumline run --nproc-per-node 2 --max-restarts 1 target/release/launch_try
//!
//!   attempt 0: every rank prints its settings and joins the group; the last one fails ─▶ all are stopped
//!   attempt 1: the same ranks again; this time all succeed
//! ```
//! A real job would load its last checkpoint where this one prints "again".
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Context, bail};
use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_rendezvous::{error_file, worker_env};

/// The variables to print, in this order. torchrun sets them as well.
const VARIABLES: [&str; 12] = [
    worker_env::RANK,
    worker_env::WORLD_SIZE,
    worker_env::LOCAL_RANK,
    worker_env::LOCAL_WORLD_SIZE,
    worker_env::GROUP_RANK,
    worker_env::GROUP_WORLD_SIZE,
    worker_env::ROLE_RANK,
    worker_env::ROLE_NAME,
    worker_env::MASTER_ADDR,
    worker_env::MASTER_PORT,
    worker_env::TORCHELASTIC_RESTART_COUNT,
    worker_env::TORCHELASTIC_MAX_RESTARTS,
];

fn main() -> ExitCode {
    error_file::install_panic_file();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            // The launcher's report quotes it. It is printed above in any case.
            let _ = error_file::record_error(error.as_ref());
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let attempt = restarts().context("no launcher has started this; try `drumline run launch_try`")?;
    println!("{}", VARIABLES.map(setting).join(" "));

    let group = ProcessGroup::from_env()?;
    let mut ones = [1_u32];
    group.all_reduce(&mut ones, ReduceOp::Sum)?;
    println!("rank {}: {} ranks have met in attempt {attempt}", group.rank(), ones[0]);
    group.barrier()?; // so that all have printed it before one fails

    let is_last = group.rank() + 1 == group.size();
    if attempt == 0 && is_last {
        bail!("failing on purpose in the first attempt; with --max-restarts 1 there is a second");
    }
    group.barrier()?;
    println!("rank {}: done{}", group.rank(), if attempt > 0 { ", again" } else { "" });
    Ok(())
}

fn restarts() -> Option<usize> {
    std::env::var(worker_env::TORCHELASTIC_RESTART_COUNT).ok()?.parse().ok()
}

fn setting(name: &str) -> String {
    format!("{name}={}", std::env::var(name).unwrap_or_else(|_| "(not set)".to_owned()))
}
