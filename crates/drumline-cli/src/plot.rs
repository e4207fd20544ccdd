//! `drumline plot`: curves of runs as SVG or PNG.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use drumline_observe::plot::{self, PlotOptions, Scale};

const EXAMPLES: &str = "\
Examples:
  drumline plot exp/a                                        plot.svg: loss and evaluations
  drumline plot exp/a exp/b --metric loss,acc1 --out ab.png  two runs in the same panels
  drumline plot exp --metric loss --smooth 0.9 --log         all runs in exp; smoothed, logarithmic axis

A run is its OUT_DIR, the folder above (all runs in it), or a file of events such as exp/a/metrics.1.jsonl; it may still be running. A metric is any number in \
metrics.jsonl: loss, lr, samples_per_s, acc1, …; for an unknown name the error lists those that exist.";

/// Draw curves of one or several runs: loss, accuracy, learning rate, …
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlotArgs {
    /// Folders of runs
    #[arg(required = true, value_name = "DIR")]
    runs: Vec<PathBuf>,
    /// Metrics, a panel for each [default: the loss, and the metrics of evaluations]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    metric: Vec<String>,
    /// The picture; its name ends in .svg or .png
    #[arg(long, value_name = "FILE", default_value = "plot.svg")]
    out: PathBuf,
    /// Weight of the past, from 0 to below 1, as in TensorBoard
    #[arg(long, value_name = "WEIGHT", default_value = "0")]
    smooth: f64,
    /// A logarithmic vertical axis
    #[arg(long)]
    log: bool,
}

/// Draws, and prints the name of the picture.
pub(crate) fn plot(args: &PlotArgs) -> anyhow::Result<()> {
    // Before anything is read: the name may be wrong.
    plot::Format::of(&args.out)?;
    let runs = plot::load(&args.runs)?;
    let scale = if args.log { Scale::Log } else { Scale::Linear };
    let options = PlotOptions { smooth: args.smooth, scale, ..PlotOptions::default() };
    plot::save(&args.out, &runs, &args.metric, options)?;
    writeln!(std::io::stdout(), "{}", args.out.display()).context("cannot print")
}
