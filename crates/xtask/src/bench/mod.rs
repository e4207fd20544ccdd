//! `cargo xtask bench`: ours and the peers side by side in one run.
//!
//! ```text
//!   build ─▶ contest (each unit behind a gate, in rotated order) ─▶ tally ─▶ goals ─▶ report
//! ```
//! The words are those of `contest`: contenders take turns at cases, block by block, so that slow changes of the machine
//! meet all contenders alike. A new comparison is a file that implements `Contest` and writes a report of its tally.

mod build;
mod checks;
mod child;
mod collectives;
mod contender;
mod contest;
mod ddp;
mod json_line;
mod launch;
mod loader;
mod losses;
pub(crate) mod machine;
mod memory;
mod need;
mod observe;
mod pace;
mod pipeline;
mod progress;
mod quiet;
pub(crate) mod report;
mod schedule;
mod shard;
mod sides;
mod spread;
mod step_goal;
mod tally;
mod transformer;
mod update_cycle;

pub(crate) use build::{BENCHED, DRUMLINE, DRUMLINE_TRAIN, built, release};

/// Compare with the peers, interleaved in one run
#[derive(clap::Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(clap::Subcommand, Debug)]
enum Subject {
    /// All-reduce and the other collectives against Open MPI, MPICH, gloo and the hardware's floor
    Collectives(collectives::CollectivesArgs),
    /// What fingerprints, deadlines and death checks cost a call
    Checks(checks::ChecksArgs),
    /// Training steps of ResNet-18 with two CPU ranks against PyTorch DDP
    Ddp(ddp::DdpArgs),
    /// The launcher against torchrun: first line, restart, 500 ranks, memory
    Launch(launch::LaunchArgs),
    /// The loader against torch's DataLoader: CIFAR and a folder of JPEG files
    Loader(loader::LoaderArgs),
    /// Memory of a training with its states in several places, and the speed of Adam
    Memory(memory::MemoryArgs),
    /// Training steps with everything that can be watched, and without
    Observe(observe::ObserveArgs),
    /// Pipelines of CPU ranks against torch.distributed.pipelining, and against the simulator
    Pipeline(pipeline::PipelineArgs),
    /// Steps and memory of sharded training (ZeRO) against PyTorch's FSDP2
    Shard(shard::ShardArgs),
    /// A Transformer's training steps with two CPU ranks, and its translations, against PyTorch's
    Transformer(transformer::TransformerArgs),
    /// The same total batch by 1, 2 and 4 ranks: losses compared, loss and speed drawn
    UpdateCycle(update_cycle::UpdateCycleArgs),
    /// 10,000 ranks meeting in the store, against PyTorch's TCPStore
    Rendezvous,
}

/// Run the comparison that was asked for.
pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    match args.subject {
        Subject::Collectives(args) => collectives::run(&args),
        Subject::Checks(args) => checks::run(&args),
        Subject::Ddp(args) => ddp::run(&args),
        Subject::Launch(args) => launch::run(&args),
        Subject::Loader(args) => loader::run(&args),
        Subject::Memory(args) => memory::run(&args),
        Subject::Observe(args) => observe::run(&args),
        Subject::Pipeline(args) => pipeline::run(&args),
        Subject::Shard(args) => shard::run(&args),
        Subject::Transformer(args) => transformer::run(&args),
        Subject::UpdateCycle(args) => update_cycle::run(&args),
        Subject::Rendezvous => rendezvous(),
    }
}

fn rendezvous() -> anyhow::Result<()> {
    let script = crate::workspace::root().join("bench/rendezvous/run.py");
    let python = crate::python::with_torch()?;
    let mut command = std::process::Command::new("python3");
    let status = command.arg(script).env(crate::python::Module::Torch.variable(), python).status()?;
    anyhow::ensure!(status.success(), "the comparison failed: {status}");
    Ok(())
}
