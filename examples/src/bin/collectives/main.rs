//! Every collective operation as a picture: what each rank held before, and what it holds after.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin collectives         4 ranks
//!   cargo run --release -p drumline-examples --bin collectives -- 6    6 ranks
//! ```
//! Without a launcher, the program starts itself once for every rank. The pictures show real data: rank 0 gathers what
//! all ranks held, and checks it. Read `steps.rs` for the calls; `picture.rs` only draws.
#![forbid(unsafe_code)]

mod barrier;
mod disagreement;
mod picture;
mod steps;

use std::process::ExitCode;

use anyhow::{bail, ensure};
use drumline_comm::{GroupOptions, ProcessGroup};
use drumline_launch::LocalJob;
use picture::Painter;
use steps::{STEPS, Step, held_at_first};

const HELP: &str = "\
Shows every collective operation as a picture: what each rank held before, and what it holds after.

Usage: collectives [RANKS]

  RANKS    processes to start, 2 to 10; default 4. Inside a job (RANK is set) the job's ranks are used.";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let in_a_job = std::env::var_os("RANK").is_some();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--help" | "-h"] => println!("{HELP}"),
        [] if in_a_job => show_all()?,
        [ranks] if in_a_job => bail!(
            "RANK is set, so this is a rank of a job, which has its ranks; try without `{ranks}`, or unset RANK"
        ),
        [] => start_ranks(4)?,
        [ranks] => match ranks.parse() {
            Ok(ranks) => start_ranks(ranks)?,
            Err(_) => bail!("`{ranks}` is no number of ranks; try 4, or --help"),
        },
        [_, unexpected, ..] => bail!("one number of ranks is enough, got `{unexpected}` too; try --help"),
    }
    Ok(())
}

/// Starts this program once for every rank. Each finds its rank in its environment.
fn start_ranks(ranks: usize) -> anyhow::Result<()> {
    check_size(ranks)?;
    GroupOptions::from_env()?; // an error here is reported once, not by every rank
    let report = LocalJob::this_program(ranks, [] as [&str; 0])?.start()?.wait();
    match report.root_cause.and_then(|rank| report.rank(rank)) {
        Some(rank) => bail!("rank {} failed ({}); if it said why, that is above", rank.rank, rank.exit),
        None => Ok(()),
    }
}

fn check_size(world: usize) -> anyhow::Result<()> {
    ensure!((2..=10).contains(&world), "the pictures are made for 2 to 10 ranks, got {world}; try 4");
    Ok(())
}

/// What each rank does; rank 0 prints.
fn show_all() -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    check_size(group.size())?;
    let painter = Painter::for_stdout(group.rank());

    let processes = group.all_gather_object(&std::process::id())?;
    painter.title(&processes);
    for step in STEPS {
        show(&group, &painter, step)?;
    }
    barrier::show(&group, &painter)?;
    disagreement::show(&group, &painter)?;
    painter.farewell();
    Ok(())
}

/// Runs one step on all ranks, draws it, and checks it.
fn show(group: &ProcessGroup, painter: &Painter, step: &Step) -> anyhow::Result<()> {
    let before = held_at_first(group.rank(), step.cells.count(group));
    let after = (step.run)(group, &before)?;

    let befores = group.all_gather_object(&before)?;
    let afters = group.all_gather_object(&after)?;
    painter.step(step, &befores, &afters);
    for (rank, after) in afters.iter().enumerate() {
        let expected = (step.expected)(rank, &befores);
        ensure!(
            *after == expected,
            "{}: rank {rank} should hold {expected:?}, but holds {after:?}",
            step.name
        );
    }
    Ok(())
}
