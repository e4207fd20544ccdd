//! One rank's part: join, bind to a core, measure each size; rank 0 prints.

use std::io::{Stdout, Write};

use anyhow::Context;
use drumline_comm::{DType, GroupOptions, ProcessGroup, bf16, f16};
use drumline_launch::placing::{Topology, cpus_of_the_machine};

use super::BenchArgs;
use super::binding::{Binding, bind_to_core};
use super::buffers::{Memory, last_level_cache};
use super::progress::Progress;
use super::ranks::is_one_of_ours;
use super::row::{Figures, Row, rounded};
use super::sizes::ByteSize;
use super::table::{Header, Table};
use super::turns::{Plan, measure};
use crate::errors::Mistake;

/// One special build leaves out the checks; its results must not be mistaken for ours.
const BACKEND: &str = if cfg!(feature = "unchecked") { "drumline-unchecked" } else { "drumline" };

/// Runs as a rank. `variable` is the one that holds its rank.
pub(super) fn run(args: &BenchArgs, variable: &str) -> anyhow::Result<()> {
    let options = GroupOptions::from_env().map_err(Mistake::new)?;
    let member = drumline_rendezvous::from_env().with_context(|| cannot_join(variable))?;
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let here = Here {
        host: member.host.clone(),
        local_rank: member.local_rank,
        local_ranks: member.local_world_size.unwrap_or(member.world_size),
    };
    let group = ProcessGroup::new(member, GroupOptions { transport: args.transport, ..options })?;
    let sizes = args.sizes_among(group.size())?;
    // Only now: the group's own threads stay unbound, and it sees how many cores there are.
    let binding = here.bind(args, &group)?;
    let machine = cpus_of_the_machine().unwrap_or(usable);
    let table = Table::new(std::io::stdout(), Header { usable, machine, binding, cold: args.cold });
    measure_all(args, &group, &sizes, table)
}

fn cannot_join(variable: &str) -> String {
    let why = if is_one_of_ours() { "" } else { &format!(" ({variable} is set, so this is a rank of one)") };
    format!("cannot join the job{why}")
}

/// Where this rank runs.
struct Here {
    host: String,
    local_rank: usize,
    local_ranks: usize,
}

impl Here {
    /// Binds this rank to a core, unless the launcher has done so, the user forbids it, or there are too few cores.
    fn bind(&self, args: &BenchArgs, group: &ProcessGroup) -> anyhow::Result<Binding> {
        let topology = Topology::here();
        let of_all = group.all_gather_object(&(self.host.clone(), topology.allowed()))?;
        let found =
            Binding::found(of_all.iter().filter(|(host, _)| *host == self.host).map(|(_, cores)| cores));
        if args.no_bind || found == Binding::Launcher {
            return Ok(found);
        }
        bind_to_core(self.local_rank, self.local_ranks, topology.cpus())
            .context("cannot bind to a core; try --no-bind")
    }
}

/// Measures each size. Rank 0 prints a row of the table after each, or JSON at the end.
fn measure_all(
    args: &BenchArgs,
    group: &ProcessGroup,
    sizes: &[usize],
    mut table: Table<Stdout>,
) -> anyhow::Result<()> {
    let (op, progress) = (args.op, Progress::of_rank(group.rank()));
    let plan = Plan {
        op,
        memory: args.memory,
        per_size: args.seconds_per_size,
        cold: args.cold.then(last_level_cache),
    };
    let mut rows = Vec::new();
    for (index, &bytes) in sizes.iter().enumerate() {
        progress.show(&format!("{op} of {} ({} of {})", ByteSize(bytes), index + 1, sizes.len()));
        let measured = measure_as(args.dtype(), group, &plan, bytes);
        progress.erase();
        let micros = measured?;
        if group.rank() == 0 {
            let row = row(args, group, bytes, micros);
            if !args.json {
                table.print(&row).context("cannot print the results")?;
            }
            rows.push(row);
        }
    }
    if args.json && group.rank() == 0 {
        print_json(&rows).context("cannot print the results")?;
    }
    Ok(())
}

fn measure_as(dtype: DType, group: &ProcessGroup, plan: &Plan, bytes: usize) -> anyhow::Result<Vec<f64>> {
    match dtype {
        DType::F64 => measure::<f64>(group, plan, bytes),
        DType::F32 => measure::<f32>(group, plan, bytes),
        DType::F16 => measure::<f16>(group, plan, bytes),
        DType::Bf16 => measure::<bf16>(group, plan, bytes),
        DType::I8 => measure::<i8>(group, plan, bytes),
        DType::I16 => measure::<i16>(group, plan, bytes),
        DType::I32 => measure::<i32>(group, plan, bytes),
        DType::I64 => measure::<i64>(group, plan, bytes),
        DType::U8 => measure::<u8>(group, plan, bytes),
        DType::U16 => measure::<u16>(group, plan, bytes),
        DType::U32 => measure::<u32>(group, plan, bytes),
        DType::U64 => measure::<u64>(group, plan, bytes),
        DType::Bool => measure::<bool>(group, plan, bytes),
    }
}

fn row(args: &BenchArgs, group: &ProcessGroup, bytes: usize, micros: Vec<f64>) -> Row {
    let figures = Figures::of(args.op, group.size(), bytes, micros);
    Row {
        op: args.op.to_string(),
        world: group.size(),
        bytes,
        dtype: args.dtype().name(),
        memory: match args.memory {
            Memory::Private => "private",
            Memory::Heap => "heap",
        },
        backend: BACKEND,
        transport: group.transport(),
        median_us: rounded(figures.median, 3),
        p99_us: rounded(figures.p99, 3),
        algbw_gbps: rounded(figures.rate, 4),
        busbw_gbps: rounded(figures.bus_rate, 4),
    }
}

fn print_json(rows: &[Row]) -> std::io::Result<()> {
    let lines: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "[\n {}\n]", lines?.join(",\n "))?;
    stdout.flush()
}
