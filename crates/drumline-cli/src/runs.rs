//! `drumline runs`: a list of runs, those that are running and those that are on disk.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use drumline_observe::runs::{self, Summary};

use crate::errors::print_line;

const EXAMPLES: &str = "\
Examples:
  drumline runs               your jobs that run on this machine, and runs in this folder down to three levels
  drumline runs exp           the runs in exp
  drumline runs --json exp    one JSON object per line, for programs

RUN STATE EPOCH STEP BEST AGE, the latest first. AGE is the time since a run last wrote something. BEST is the metric by which \
the run chose its best checkpoint.";

/// How many levels below a folder are searched for runs.
const LEVELS: usize = 3;

/// List runs: their state, progress, best result and age
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunsArgs {
    /// Folders to look in [default: this one, and your running jobs]
    #[arg(value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
}

/// Prints the list to stdout.
pub(crate) fn runs(args: &RunsArgs) -> anyhow::Result<()> {
    let found = found(&args.folders)?;
    let mut summaries: Vec<_> = found.iter().map(|folder| Summary::read(folder)).collect();
    let age = |summary: &Summary| summary.age_s.unwrap_or(f64::INFINITY);
    summaries.sort_by(|a, b| age(a).total_cmp(&age(b)));
    let text = if args.json {
        summaries.iter().map(serde_json::to_string).map(|line| line.map(|line| line + "\n")).collect()
    } else {
        Ok(table(&summaries))
    };
    if summaries.is_empty() {
        print_line("no runs found; try drumline runs DIR with a folder that contains an OUT_DIR");
    }
    std::io::stdout().write_all(text?.as_bytes()).context("cannot print")
}

/// The folders of runs, each once.
fn found(folders: &[PathBuf]) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    if folders.is_empty() {
        found.extend(runs::running()?.into_iter().map(|run| run.dir));
    }
    let here = [PathBuf::from(".")];
    for folder in if folders.is_empty() { &here } else { folders } {
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let below = runs::below(folder, LEVELS);
        found.extend(below.iter().map(|run| run.canonicalize().unwrap_or_else(|_| run.clone())));
    }
    Ok(found)
}

fn table(summaries: &[Summary]) -> String {
    if summaries.is_empty() {
        return String::new();
    }
    let here = std::env::current_dir().unwrap_or_default();
    let mut rows = vec![["RUN", "STATE", "EPOCH", "STEP", "BEST", "AGE"].map(str::to_owned)];
    rows.extend(summaries.iter().map(|summary| row(summary, &here)));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3, 4, 5].map(width);
    let line = |row: &[String; 6]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn row(summary: &Summary, here: &Path) -> [String; 6] {
    let of = |number: u64, total: Option<u64>| match total {
        Some(total) if number <= total => format!("{number}/{total}"),
        _ => number.to_string(),
    };
    let folder = summary.folder.strip_prefix(here).unwrap_or(&summary.folder);
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let best = summary.best.as_ref().map(|best| format!("{} {:.4}", best.name, best.value));
    [
        folder.display().to_string(),
        summary.state.name().to_owned(),
        of(summary.epoch, summary.epochs),
        of(summary.step, summary.total_steps),
        best.unwrap_or_else(|| "-".to_owned()),
        summary.age_s.map_or_else(|| "-".to_owned(), age),
    ]
}

/// An age in the largest unit that fits.
fn age(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_in_the_largest_unit_that_fits() {
        let ages = [0.4, 119.0, 120.0, 7199.0, 7200.0, 172_800.0].map(age);
        assert_eq!(ages, ["0 s", "119 s", "2 min", "119 min", "2 h", "2 d"]);
    }
}
