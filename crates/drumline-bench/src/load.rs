//! `drumline-bench load`: the first weights of a GPT from one safetensors file, for ranks that share one copy (ZeRO-3).
//!
//! ```text
//!   rank 0 maps the file ─▶ engine: flat memory that all ranks of the machine share ─▶ each rank compares its rows with the file
//! ```
//! Beside it rank 0 reads the file alone, through a small buffer and into new memory, which is the least that a program
//! does that loads it.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::Args;
use drumline::checkpoint::safetensors;
use drumline::comm::Mesh;
use drumline::engine::{Engine, EngineOptions, EngineSetup, ShardOptions, Stage};
use drumline::{ProcessGroup, ReduceOp};
use drumline_zoo::first_weights::FirstWeights;
use drumline_zoo::formula::fill;
use drumline_zoo::gpt::weights;
use drumline_zoo::models::gpt::Gpt;
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

use super::shard::{Size, pss};

/// Time how ranks that share one copy of a GPT load it from a file
#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    /// How large the model is
    #[arg(long)]
    size: Size,
    /// The file; rank 0 writes it if it is not there
    #[arg(long)]
    file: PathBuf,
    /// How often each side is timed
    #[arg(long, default_value_t = 3)]
    blocks: usize,
    /// Make the system forget the file before each turn, so that it is read from the disk; needs root
    #[arg(long)]
    cold: bool,
}

/// Loads, and rank 0 prints one JSON line per block.
pub(super) fn run(args: &LoadArgs) -> anyhow::Result<()> {
    tch::set_num_threads(1);
    let group = ProcessGroup::from_env()?;
    if group.rank() == 0 && !args.file.exists() {
        write(args)?;
    }
    group.barrier()?;
    for block in 0..args.blocks {
        let [buffered, into_memory] = reads(args, &group)?;
        let loaded = load(args, &group)?;
        let line = json!({
            "block": block,
            "load_s": loaded.seconds,
            "read_through_a_buffer_s": buffered,
            "read_into_memory_s": into_memory,
            "peak_private_bytes": loaded.private,
            "pss_bytes": loaded.pss,
            "file_bytes": std::fs::metadata(&args.file)?.len(),
        });
        if group.rank() == 0 {
            println!("{line}");
        }
    }
    Ok(())
}

fn write(args: &LoadArgs) -> anyhow::Result<()> {
    let (store, options) = (VarStore::new(Device::Cpu), args.size.options());
    Gpt::new(&store.root(), &options)?;
    fill(&store);
    Ok(weights::save(&store, &options, &args.file)?)
}

/// Seconds in which rank 0 reads the file alone.
fn reads(args: &LoadArgs, group: &ProcessGroup) -> anyhow::Result<[f64; 2]> {
    let mut seconds = [0.0; 2];
    for (place, seconds) in seconds.iter_mut().enumerate() {
        forget(args, group)?;
        if group.rank() == 0 {
            let began = Instant::now();
            if place == 0 {
                read_through_a_buffer(&args.file)?
            } else {
                drop(std::fs::read(&args.file)?)
            }
            *seconds = began.elapsed().as_secs_f64();
        }
        group.barrier()?;
    }
    Ok(seconds)
}

fn read_through_a_buffer(path: &Path) -> anyhow::Result<()> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; 1 << 20]);
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Makes the system forget the file, if that is asked for.
fn forget(args: &LoadArgs, group: &ProcessGroup) -> anyhow::Result<()> {
    if args.cold && group.rank() == 0 {
        File::open(&args.file)?.sync_all()?;
        let mut knob = File::options().write(true).open("/proc/sys/vm/drop_caches");
        let knob = knob.as_mut().map_err(|error| anyhow::anyhow!("{error}"));
        knob.context("cannot make the system forget files; try as root")?.write_all(b"1")?;
    }
    Ok(group.barrier()?)
}

struct Loaded {
    seconds: f64,
    /// The most bytes of its own that any rank had, besides what ranks share.
    private: f64,
    /// Of all ranks, afterwards.
    pss: f64,
}

fn load(args: &LoadArgs, group: &ProcessGroup) -> anyhow::Result<Loaded> {
    let (store, options, empty) = (VarStore::new(Device::Cpu), args.size.options(), pss()?);
    let first_weights = FirstWeights::of_rank(group.rank());
    // Loading is timed, and not drawing: all ranks leave the memory of variables untouched.
    FirstWeights::Taker.build(|| Gpt::new(&store.root(), &options))?;
    forget(args, group)?;
    let began = Instant::now();
    first_weights.build(|| weights::load(&store, &options, &args.file))?;
    let shard = ShardOptions::new(Stage::Zero3);
    let mesh = Mesh::new(group, shard.mesh_shape(group.size())?)?;
    let engine = Box::new(shard).engine(EngineSetup::new(&store, &mesh))?;
    group.barrier()?;
    let mut seconds = [began.elapsed().as_secs_f64()];
    group.all_reduce(&mut seconds, ReduceOp::Max)?;
    let mut used = [pss()? - empty];
    group.all_reduce(&mut used, ReduceOp::Sum)?;
    let mut private = [private()?];
    group.all_reduce(&mut private, ReduceOp::Max)?;
    compare(&*engine, &args.file)?;
    Ok(Loaded { seconds: seconds[0], private: private[0], pss: used[0] })
}

/// The rows of this rank must be those of the file.
fn compare(engine: &dyn Engine, file: &Path) -> anyhow::Result<()> {
    let saved = safetensors::map(file)?;
    for placed in engine.state() {
        let Some(whole) = saved.get(&placed.name) else { continue };
        let first = placed.offsets.first().copied().unwrap_or(0);
        // Rows of padding are not in the file.
        let len = (whole.size()[0] - first).clamp(0, placed.tensor.size()[0]);
        let ours = placed.tensor.detach().narrow(0, 0, len);
        ensure!(ours.equal(&whole.narrow(0, first.min(whole.size()[0]), len)), "{} differs", placed.name);
    }
    Ok(())
}

/// The bytes of memory that only this process has.
fn private() -> anyhow::Result<f64> {
    let text = std::fs::read_to_string("/proc/self/status").context("cannot read the memory in use")?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    Ok(kib.context("/proc/self/status has no RssAnon")? * 1024.0)
}
