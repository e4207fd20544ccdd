//! `drumline trace merge`: merges the traces of all ranks of a run into one file.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use drumline_observe::runs;
use drumline_observe::trace::{self, TRACE};

use crate::errors::Mistake;

const EXAMPLES: &str = "\
Examples:
  drumline trace merge exp/a                      exp/a/trace/all-ranks.json, of all files in exp/a/trace
  drumline trace merge exp/a --out a.json
  drumline trace merge rank-00000.json other/rank-00001.json --out both.json

Open the file at ui.perfetto.dev (it stays on your machine) or in chrome://tracing. Ranks of different machines are as far apart as \
their clocks. drumline train with TRAIN.TRACE_STEPS writes traces, and so does DistTrainer::trace_steps.";

const MERGED: &str = "all-ranks.json";

/// Work with the traces of a run
#[derive(Debug, clap::Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, clap::Subcommand)]
enum TraceCommand {
    Merge(MergeArgs),
}

/// Merge the traces of all ranks into one file for Perfetto
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct MergeArgs {
    /// OUT_DIR of a run, or files of its ranks
    #[arg(required = true, value_name = "DIR|FILE")]
    traces: Vec<PathBuf>,
    /// The file to write [default: trace/all-ranks.json in the first DIR]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs `drumline trace merge`, and prints the name of the file.
pub(crate) fn trace(args: TraceArgs) -> anyhow::Result<()> {
    let TraceCommand::Merge(MergeArgs { traces, out }) = args.command;
    let mut files = Vec::new();
    for given in &traces {
        files.extend(files_of(given)?);
    }
    let beside = || files[0].parent().map_or_else(|| MERGED.into(), |folder| folder.join(MERGED));
    let out = out.unwrap_or_else(beside);
    trace::merge(&files, &out)?;
    writeln!(std::io::stdout(), "{}", out.display()).context("cannot print")
}

/// The rank files that a path means: itself, those in it, in its `trace`, or in that of the run one level down.
fn files_of(given: &Path) -> Result<Vec<PathBuf>, Mistake> {
    if given.is_file() {
        return Ok(vec![given.to_owned()]);
    }
    let places = [given.to_owned(), given.join(TRACE)].into_iter();
    let below = runs::within(given).into_iter().map(|run| run.join(TRACE));
    let found = places.chain(below).map(|folder| rank_files(&folder)).find(|files| !files.is_empty());
    found.ok_or_else(|| {
        let given = given.display();
        Mistake::new(format!(
            "no trace in {given}: there is no {TRACE}/rank-00000.json; try a run with TRAIN.TRACE_STEPS 5"
        ))
    })
}

/// The files that ranks have written, in the order of ranks.
fn rank_files(folder: &Path) -> Vec<PathBuf> {
    let is_ranks = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("rank-") && name.ends_with(".json")
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(is_ranks).collect();
    files.sort();
    files
}
