//! The steps that benchmarks time: `cargo xtask bench` and the scripts of `bench/` start this program beside their peers.
//!
//! | command | what is timed |
//! |---|---|
//! | `adam` | steps of AdamW on one large tensor |
//! | `checkpoint` | forward and backward of a GPT with activation checkpointing |
//! | `gpu` | steps of a network on a GPU, eager and as a graph |
//! | `load` | the weights of a GPT from a file, for ranks that share one copy |
//! | `loader` | batches of images |
//! | `memory` | the memory of a GPT whose states are in different places |
//! | `observe` | steps with and without what watches them |
//! | `offload` | steps of a GPT on a GPU whose optimizer's state is in host memory |
//! | `optim` | steps of an optimizer alone |
//! | `pipeline` | steps of a GPT that is cut by its layers, and pipelines that sleep |
//! | `shard` | steps of a GPT with each stage of ZeRO |
//! | `shard-gpu` | the same on GPUs |
//! | `step` | data parallel steps |
//! | `transformer` | steps and translations of a Transformer |
#![forbid(unsafe_code)]

mod adam;
mod checkpoint;
mod gpu;
mod load;
mod loader;
mod memory;
mod observe;
mod offload;
mod optim;
mod pipeline;
mod shard;
mod shard_gpu;
mod step;
mod transformer;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Time steps for benchmarks; one rank of a job
#[derive(Debug, Parser)]
#[command(name = "drumline-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Adam(adam::AdamArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Gpu(gpu::GpuArgs),
    Load(load::LoadArgs),
    Loader(loader::LoaderArgs),
    Memory(memory::MemoryArgs),
    Observe(observe::ObserveArgs),
    Offload(offload::OffloadArgs),
    Optim(optim::OptimArgs),
    Pipeline(pipeline::PipelineArgs),
    Shard(shard::ShardArgs),
    ShardGpu(shard_gpu::ShardGpuArgs),
    Step(step::StepArgs),
    Transformer(transformer::TransformerArgs),
}

fn main() -> ExitCode {
    drumline::exit_code(match Cli::parse().command {
        Command::Adam(args) => adam::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Gpu(args) => gpu::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Loader(args) => loader::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Observe(args) => observe::run(&args),
        Command::Offload(args) => offload::run(&args),
        Command::Optim(args) => optim::run(&args),
        Command::Pipeline(args) => pipeline::run(&args),
        Command::Shard(args) => shard::run(&args),
        Command::ShardGpu(args) => shard_gpu::run(&args),
        Command::Step(args) => step::run(&args),
        Command::Transformer(args) => transformer::run(&args),
    })
}
