//! One rank's part: join, take a core, measure size by size; rank 0 prints.

use std::io::{IsTerminal, Write};

use anyhow::Context;
use drumline_comm::{DType, GroupOptions, ProcessGroup, bf16, f16};

use super::BenchArgs;
use super::buffers::{Memory, last_level_cache};
use super::ranks::{TALK, TALK_MARK};
use super::row::{Figures, Row, rounded};
use super::sizes::ByteSize;
use super::table::{Header, print_table};
use super::turns::{Plan, measure};
use crate::binding::bind_to_core;

/// The checks are left out in one special build, whose figures must not be taken for ours.
const BACKEND: &str = if cfg!(feature = "unchecked") { "drumline-unchecked" } else { "drumline" };

pub(super) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let member = drumline_rendezvous::from_env().context("cannot join the job")?;
    let (local_rank, local_ranks) = (member.local_rank, member.local_world_size.unwrap_or(member.world_size));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let options = GroupOptions { transport: args.transport, ..GroupOptions::from_env()? };
    let group = ProcessGroup::new(member, options)?;
    // Only now: the group's own threads stay free, and it sees how many cores there are.
    let bound = !args.no_bind
        && bind_to_core(local_rank, local_ranks).context("cannot bind to a core; try --no-bind")?;
    let rows = rows(args, &group)?;
    if group.rank() != 0 {
        return Ok(());
    }
    let header = Header { cores, bound, cold: args.cold };
    let printed = if args.json {
        print_json(&rows)
    } else {
        print_table(&mut std::io::stdout().lock(), &header, &rows)
    };
    printed.context("cannot print the results")
}

fn rows(args: &BenchArgs, group: &ProcessGroup) -> anyhow::Result<Vec<Row>> {
    let op = args.op;
    let plan = Plan {
        op,
        memory: args.memory,
        per_size: args.seconds_per_size,
        cold: args.cold.then(last_level_cache),
    };
    let sizes = args.sizes_among(group.size())?;
    let mut rows = Vec::new();
    for (index, &bytes) in sizes.iter().enumerate() {
        if group.rank() == 0 {
            talk(&format!("{op} of {} ({} of {})", ByteSize(bytes), index + 1, sizes.len()));
        }
        let micros = measure_as(args.dtype, group, &plan, bytes)?;
        if group.rank() == 0 {
            rows.push(row(args, group, bytes, micros));
        }
    }
    Ok(rows)
}

fn talk(what: &str) {
    if std::env::var_os(TALK).is_some() || std::io::stderr().is_terminal() {
        eprintln!("{TALK_MARK}{what}");
    }
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
        dtype: args.dtype.name(),
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
