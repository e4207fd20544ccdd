//! Every collective operation as a picture: what each rank held before, and what it holds after.
//!
//! ```text
//!   cargo run --release -p drumline-examples --bin collectives         4 ranks
//!   cargo run --release -p drumline-examples --bin collectives -- 6    6 ranks
//! ```
//! Started without a launcher, the program starts itself once for every rank. What is shown was really sent: rank 0 gathers
//! what all ranks held and checks it. Read `steps.rs` for the calls; `picture.rs` only draws.
#![forbid(unsafe_code)]

mod barrier;
mod disagreement;
mod picture;
mod steps;

use anyhow::{Context, bail, ensure};
use drumline_comm::ProcessGroup;
use drumline_launch::LocalJob;
use picture::Painter;
use steps::{STEPS, Step, held_at_first};

fn main() -> anyhow::Result<()> {
    if std::env::var_os("RANK").is_some() { show_all() } else { start_ranks() }
}

/// Starts this program once for every rank. Each finds its rank in its environment.
fn start_ranks() -> anyhow::Result<()> {
    let ranks = match std::env::args().nth(1) {
        Some(text) => text.parse().with_context(|| format!("`{text}` is no number of ranks; try 4"))?,
        None => 4,
    };
    check_size(ranks)?;
    let report = LocalJob::this_program(ranks, [] as [&str; 0])?.start()?.wait();
    match report.root_cause {
        Some(rank) => bail!("rank {rank} failed; its message is above"),
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
