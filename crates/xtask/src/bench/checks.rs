//! `cargo xtask bench checks`: what fingerprints, deadlines and death checks cost a call.
//!
//! Two builds of the same command, one with the checks compiled out, take turns; the figure is the difference of medians.

use anyhow::Context;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{child, record};
use crate::workspace::{Workspace, cargo};

/// What the checks cost: ours against ours with the checks compiled out
#[derive(clap::Args, Debug)]
pub(crate) struct ChecksArgs {
    /// How often the two take turns
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Seconds for each size of each turn
    #[arg(long, default_value_t = 0.3)]
    seconds_per_size: f64,
}

const SIZES: &str = "16,4K,64K,1M,16M";
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn run(args: &ChecksArgs) -> anyhow::Result<()> {
    let target = Workspace::load()?.target_dir;
    let checked = build(&target, &[])?;
    let unchecked = build(&target.join("unchecked"), &["--features", "unchecked"])?;
    for memory in ["private", "heap"] {
        let (mut with, mut without) = (Medians::new(), Medians::new());
        for round in 0..args.rounds {
            eprintln!("{memory}: turn {} of {}", round + 1, args.rounds);
            measure(&checked, memory, args, &mut with)?;
            measure(&unchecked, memory, args, &mut without)?;
        }
        report(memory, &with, &without);
    }
    Ok(())
}

type Medians = BTreeMap<u64, Vec<f64>>;

fn build(target: &Path, features: &[&str]) -> anyhow::Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--release", "--quiet", "--package", "drumline-cli"]).args(features);
    command.arg("--target-dir").arg(target);
    let status = command.status().context("cannot start cargo")?;
    anyhow::ensure!(status.success(), "the build of drumline-cli failed: {status}");
    Ok(target.join("release/drumline"))
}

fn measure(program: &Path, memory: &str, args: &ChecksArgs, into: &mut Medians) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.args([
        "bench",
        "all-reduce",
        "--json",
        "--sizes",
        SIZES,
        "--memory",
        memory,
        "--seconds-per-size",
    ]);
    command.arg(args.seconds_per_size.to_string());
    for row in record::parse(&child::run(command, LIMIT)?.stdout)? {
        into.entry(row.bytes).or_default().push(row.median_us);
    }
    Ok(())
}

fn report(memory: &str, with: &Medians, without: &Medians) {
    println!("all-reduce, 2 ranks, {memory} memory; medians over the turns, quickest turn in brackets");
    println!("{:>12} {:>22} {:>22} {:>12}", "bytes", "with checks, µs", "without, µs", "cost, µs");
    for (bytes, with) in with {
        let Some(without) = without.get(bytes) else { continue };
        let (a, b) = (median(with), median(without));
        let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        let show = |middle, times: &[f64]| format!("{middle:.2} ({:.2})", least(times));
        println!("{bytes:>12} {:>22} {:>22} {:>12.2}", show(a, with), show(b, without), a - b);
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
    }
}
