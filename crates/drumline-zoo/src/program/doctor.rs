//! `drumline-train doctor gpu`: reports the GPUs, their driver and libraries, and their bandwidths, and explains what
//! is missing.
//!
//! ```text
//!   every rank: its versions ─▶ gathered ─▶ rank 0: GPUs, peer access, bandwidths, NCCL
//!                                         ─▶ all ranks: an all-reduce ─▶ Report ─▶ lines, or JSON
//! ```
//! The exit code is 1 if there is a problem.

mod bandwidth;
mod problems;
mod report;
mod together;

use std::io::Write;

use anyhow::anyhow;
use clap::Args;
use drumline::ReduceOp;
use drumline::comm::{LocalGroup, TensorCollectives};
use drumline::torch::TorchError;
use drumline_torch::cuda::{self, Driver, Properties};
use drumline_torch::nccl;
use tch::{Device, Kind, Tensor};

use crate::driver::{Job, host};
use problems::problems;
use report::{Found, Gpu, NcclAlone, Rank, Report, Software, version};

/// Report GPUs, driver and libraries, and measure bandwidths
#[derive(Debug, Args)]
pub(super) struct DoctorGpuArgs {
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

/// Prints the report. Returns an error if there is a problem.
pub(super) fn run(args: &DoctorGpuArgs) -> anyhow::Result<()> {
    let job = Job::join()?;
    let (mine, gpu) = this_rank(&job);
    let ranks = job.group.all_gather_object(&mine)?;
    let is_well = problems(&ranks).is_empty();
    let report = job.is_rank_0().then(|| examine(mine.software, ranks));
    // All ranks have found the same problems, so either all of them get here or none.
    let gpu = gpu.filter(|_| is_well && job.group.size() > 1);
    let reduced = gpu.map(|gpu| together::all_reduce(&job.group, gpu));
    let outcome = report.map_or(Ok(()), |report| print(&report.with_all_reduce(reduced), args));
    // The other ranks wait until rank 0 has measured: when a rank exits, launchers check on the rest.
    job.group.barrier()?;
    outcome
}

fn print(report: &Report, args: &DoctorGpuArgs) -> anyhow::Result<()> {
    let text = if args.json { serde_json::to_string_pretty(report)? + "\n" } else { report.to_string() };
    std::io::stdout().write_all(text.as_bytes())?;
    match report.problems.len() {
        0 => Ok(()),
        1 => Err(anyhow!("GPUs cannot be used as they should: the problem is shown above")),
        several => Err(anyhow!("GPUs cannot be used as they should: {several} problems, shown above")),
    }
}

/// The description of this rank, and its GPU if that can be used.
fn this_rank(job: &Job) -> (Rank, Option<usize>) {
    let mut software = software();
    let found = software.problems().is_empty().then(|| own_gpu(job.local_rank));
    if let Some(Err(error)) = &found {
        software.libraries = Found::Problem(error.to_string());
    }
    let (gpu, num_gpus, bus) = match found.and_then(Result::ok) {
        Some((gpu, count, bus)) => (Some(gpu), count, Some(bus)),
        None => (None, 0, None),
    };
    (Rank { rank: job.group.rank(), host: host(), num_gpus, gpu: bus, software }, gpu)
}

/// The versions that this process finds.
fn software() -> Software {
    let driver = Driver::find().map(|driver| format!("CUDA {}", version(driver.version)));
    let runtime = cuda::open().map_err(TorchError::from).and_then(|()| Properties::of(0));
    Software {
        drumline: env!("CARGO_PKG_VERSION").into(),
        libtorch: drumline::torch::libtorch_version(),
        driver: driver.into(),
        libraries: runtime.map(|gpu| format!("CUDA {}", version(gpu.versions.1))).into(),
        nccl: nccl::version().into(),
    }
}

/// The GPU's index, the number of GPUs, and its PCI bus id.
fn own_gpu(local_rank: usize) -> Result<(usize, usize, String), TorchError> {
    let count = cuda::device_count()?.max(1);
    let gpu = local_rank % count;
    Ok((gpu, count, Properties::of(gpu)?.pci_bus_id))
}

/// Builds the whole report. A check that fails becomes a problem.
fn examine(software: Software, ranks: Vec<Rank>) -> Report {
    // Problems on other hosts do not stop the checks of this host.
    let can_look = software.problems().is_empty();
    let mut report = Report::new(software, ranks);
    if can_look && let Err(error) = look(&mut report) {
        report.problems.push(error.to_string());
    }
    report
}

fn look(report: &mut Report) -> Result<(), TorchError> {
    let count = cuda::device_count()?;
    for gpu in 0..count {
        let (properties, memory) = (Properties::of(gpu)?, cuda::memory(gpu)?);
        report.gpus.push(Gpu::new(gpu, properties, memory));
        let peers =
            (0..count).map(|peer| if peer == gpu { Ok(true) } else { cuda::can_access_peer(gpu, peer) });
        report.peer_access.push(peers.collect::<Result<_, _>>()?);
        report.bandwidths.extend(bandwidth::measure(gpu)?);
    }
    report.between = bandwidth::between(count)?;
    report.problems.extend(report.between.iter().filter_map(report::Between::problem));
    report.nccl_alone = Some(nccl_alone()?);
    Ok(())
}

/// Runs an all-reduce in a group of one rank on the first GPU, to see whether NCCL works at all.
fn nccl_alone() -> Result<NcclAlone, TorchError> {
    const BYTES: i64 = 64 << 20;
    let mut found = LocalGroup::run(1, |group| {
        let reduced = || -> Result<(f64, f64), TorchError> {
            let mut x = Tensor::f_ones([BYTES / 4], (Kind::Float, Device::Cuda(0)))?;
            group.all_reduce_tensor(&mut x, ReduceOp::Avg)?;
            let milliseconds =
                bandwidth::best_time(0, || group.all_reduce_tensor(&mut x, ReduceOp::PreMulSum(0.5)))? * 1e3;
            Ok((milliseconds, x.f_double_value(&[0])?))
        };
        Ok(reduced())
    })?;
    let (milliseconds, value) = found.remove(0)?;
    let expected = 0.5f64.powi(bandwidth::ROUNDS as i32);
    if value != expected {
        return Err(TorchError::value("the result of NCCL on GPU 0", value, expected.to_string()));
    }
    Ok(NcclAlone { gpu: 0, bytes: BYTES as u64, milliseconds })
}
