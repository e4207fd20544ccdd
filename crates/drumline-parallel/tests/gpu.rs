//! Tests that need a GPU: `cargo test -p drumline-parallel --features gpu --test gpu`. One GPU is enough.
//!
//! Ranks of these tests share the first GPU, so that several of them communicate through its memory (CUDA IPC); a single
//! rank uses NCCL. Tests of [`on_each_route`] run by IPC, through host memory, and over real NCCL, which for four ranks
//! needs NVIDIA's MPS (`nccl_of_four`). To test failures inside NCCL, a library stands in for it (`rank_test::StandIn`).
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

/// Defines a test for each route between ranks that share the GPU, and for two and four ranks.
macro_rules! on_each_route {
    ($name:ident, $body:block) => {
        on_each_route!($name, $body, |ranks| {
            ranks.pass()?;
        });
    };
    ($name:ident, $body:block, |$ranks:ident| $control:block) => {
        mod $name {
            use super::*;

            rank_test::ranks_test!(ipc_of_two, 2, $body, |$ranks| $control);
            rank_test::ranks_test!(ipc_of_four, 4, $body, |$ranks| $control);
            rank_test::ranks_test!(
                host_of_two,
                2,
                env = [("DRUMLINE_SHARED_GPU", "host")],
                $body,
                |$ranks| $control
            );
            rank_test::ranks_test!(
                nccl_of_two,
                2,
                env = [("DRUMLINE_SHARED_GPU", "nccl")],
                $body,
                |$ranks| $control
            );
            rank_test::ranks_test!(
                nccl_of_four,
                4,
                env = [("DRUMLINE_SHARED_GPU", "nccl")],
                $body,
                |$ranks| $control
            );
        }
    };
}

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
#[path = "gpu/offload.rs"]
mod offload;
#[path = "gpu/recording.rs"]
mod recording;
#[path = "gpu/shard.rs"]
mod shard;
#[path = "gpu/tensor.rs"]
mod tensor;
#[allow(dead_code)]
#[path = "it/tensor_model.rs"]
mod tensor_model;

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
