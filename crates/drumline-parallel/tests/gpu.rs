//! What needs a GPU, one of which is enough: `cargo test -p drumline-parallel --features gpu --test gpu`.
//!
//! Ranks of these tests share the first GPU, so that several of them go through the host's memory; a rank alone goes by NCCL. Several go NCCL's way
//! with a library that stands in for it (`rank_test::StandIn`).
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

#[path = "gpu/collectives.rs"]
mod collectives;
#[path = "gpu/cost.rs"]
mod cost;
#[path = "gpu/ddp.rs"]
mod ddp;
#[path = "gpu/faults.rs"]
mod faults;
#[path = "gpu/nccl_faults.rs"]
mod nccl_faults;
#[allow(dead_code)]
#[path = "it/net.rs"]
mod net;
#[path = "gpu/norms.rs"]
mod norms;
#[path = "gpu/recording.rs"]
mod recording;

use std::time::Duration;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_torch::cuda;
use tch::Device;

/// The GPU of all ranks.
const GPU: Device = Device::Cuda(0);

/// Enough for all that a rank alone does.
const BRIEF: Duration = Duration::from_secs(20);

/// Joins the job, with the GPU opened before anything asks for it.
fn join() -> Result<ProcessGroup> {
    cuda::open()?;
    Ok(ProcessGroup::from_env()?)
}
