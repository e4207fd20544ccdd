//! `cargo xtask bench checks`: what fingerprints, deadlines and death checks cost a call.
//!
//! Two builds of the same command, one with the checks compiled out, take turns; the figure is the difference of medians.

use anyhow::Context;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child;
use super::collectives::record::{self, Record};
use super::contender::Contender;
use super::contest::{self, Contest, TallyOf, Unit, UnitOf};
use super::pace::Pace;
use super::spread::Spread;
use crate::workspace::{Workspace, cargo};

/// What the checks cost: ours against ours with the checks compiled out
#[derive(clap::Args, Debug)]
pub(crate) struct ChecksArgs {
    #[command(flatten)]
    pace: Pace<9>,
    /// Seconds for each size of each turn
    #[arg(long, default_value_t = 0.3)]
    seconds_per_size: f64,
}

const SIZES: &str = "16,4K,64K,1M,16M";
const LIMIT: Duration = Duration::from_secs(120);

/// A build of `drumline`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    Checked,
    Unchecked,
}

const CHECKED: Contender<Build> = Contender::new("with checks", Build::Checked);
const UNCHECKED: Contender<Build> = Contender::new("without", Build::Unchecked);

/// Where the buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory(&'static str);

const MEMORIES: [Memory; 2] = [Memory("private"), Memory("heap")];

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} memory", self.0)
    }
}

/// The contest: the two builds.
struct Checks {
    checked: PathBuf,
    unchecked: PathBuf,
    seconds_per_size: f64,
}

impl Contest for Checks {
    type Case = Memory;
    type Kind = Build;
    type Figures = Vec<Record>;

    fn contenders(&self, _memory: Memory) -> Vec<Contender<Build>> {
        vec![CHECKED, UNCHECKED]
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Vec<Record>> {
        let mut command = Command::new(match unit.contender.kind {
            Build::Checked => &self.checked,
            Build::Unchecked => &self.unchecked,
        });
        command.args(["bench", "all-reduce", "--json", "--sizes", SIZES, "--memory", unit.case.0]);
        command.args(["--seconds-per-size", &self.seconds_per_size.to_string()]);
        record::parse(&child::run(command, LIMIT)?.stdout)
    }
}

/// Builds, measures, prints.
pub(crate) fn run(args: &ChecksArgs) -> anyhow::Result<()> {
    let target = Workspace::load()?.target_dir;
    let mut contest = Checks {
        checked: build(&target, &[])?,
        unchecked: build(&target.join("unchecked"), &["--features", "unchecked"])?,
        seconds_per_size: args.pace.at_most(args.seconds_per_size, 0.05),
    };
    let tally = contest::hold(&mut contest, &MEMORIES, &args.pace);
    print!("{}", tally.failures());
    MEMORIES.iter().for_each(|memory| report(&tally, *memory));
    Ok(())
}

fn build(target: &Path, features: &[&str]) -> anyhow::Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--release", "--quiet", "--package", "drumline-cli"]).args(features);
    command.arg("--target-dir").arg(target);
    let status = command.status().context("cannot start cargo")?;
    anyhow::ensure!(status.success(), "the build of drumline-cli failed: {status}");
    Ok(target.join("release/drumline"))
}

fn report(tally: &TallyOf<Checks>, memory: Memory) {
    println!("all-reduce, 2 ranks, {memory}; medians over the turns, quickest turn in brackets");
    println!("{:>12} {:>22} {:>22} {:>12}", "bytes", "with checks, µs", "without, µs", "cost, µs");
    let first = tally.all().find(|turn| turn.unit.case == memory);
    for bytes in first.iter().flat_map(|turn| turn.figures.iter().map(|record| record.bytes)) {
        let micros =
            |contender| tally.spread(Unit { case: memory, contender }, |records| micros(records, bytes));
        let (Some(with), Some(without)) = (micros(CHECKED), micros(UNCHECKED)) else { continue };
        let shown = |spread: Spread| format!("{:.2} ({:.2})", spread.median, spread.least);
        let cost = with.median - without.median;
        println!("{bytes:>12} {:>22} {:>22} {cost:>12.2}", shown(with), shown(without));
    }
}

fn micros(records: &[Record], bytes: u64) -> Option<f64> {
    records.iter().find(|record| record.bytes == bytes).map(|record| record.median_us)
}
