//! Tests that need a GPU: `cargo test -p drumline-parallel --features gpu --test gpu`. One GPU is enough.
//!
//! Ranks of these tests share the first GPU, so that several of them communicate through host memory; a single rank
//! uses NCCL. Tests with `nccl` in their name use real NCCL between ranks that share the GPU; from three ranks on that
//! needs NVIDIA's MPS. To test failures of NCCL with several ranks, a library stands in for it (`rank_test::StandIn`).
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
#[path = "gpu/shard.rs"]
mod shard;

use std::time::Duration;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_torch::cuda;
use tch::Device;

/// The GPU of all ranks.
const GPU: Device = Device::Cuda(0);

/// The timeout of tests with one rank.
const BRIEF: Duration = Duration::from_secs(20);

/// Opens the GPU, then joins the job.
fn join() -> Result<ProcessGroup> {
    cuda::open()?;
    Ok(ProcessGroup::from_env()?)
}
