//! `drumline watch`: the page of one run or several, open until Ctrl-C.
//!
//! stdout gets the address and nothing else; what a person needs to know besides goes to stderr.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use drumline_observe::page::{Page, Runs};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::telling::say;

const EXAMPLES: &str = "\
Examples:
  drumline watch                        all jobs of yours that run on this machine
  drumline watch exp/resnet18           one run, while it goes on or after its end
  drumline watch exp/*                  several, in the same charts
  drumline watch --port 0 exp/resnet18  on any free port

Open the printed address in a browser on this machine. From another one, forward the same port first, as the page answers \
to no other name:
  ssh -L 6116:127.0.0.1:6116 HOST

The page shows curves (loss, metrics, learning rate, samples/s; dashed: evaluation), a row for each rank (what it waits for, \
how it spends its time, memory; stragglers and lost ranks are marked) and the end of the log. It reads OUT_DIR's \
metrics.jsonl, ranks/ and log.txt and changes nothing; the job does not notice it.

The address has a token, made anew each time: whoever has it may look, nobody else. Ctrl-C closes the page.";

/// Show runs in a browser: curves, ranks, log
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WatchArgs {
    /// OUT_DIR of each run [default: all jobs of yours that run]
    #[arg(value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Port of 127.0.0.1; 0 finds a free one
    #[arg(long, value_name = "N", default_value_t = 6116)]
    port: u16,
}

/// Shows the page until a signal says that it is enough.
pub(crate) fn watch(args: WatchArgs) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot wait for Ctrl-C")?;
    let what = match args.folders.len() {
        0 => "all jobs of yours that run here".to_owned(),
        1 => args.folders[0].display().to_string(),
        several => format!("{several} runs"),
    };
    let runs = if args.folders.is_empty() { Runs::Running } else { Runs::Folders(args.folders) };
    let page = Page::bind(args.port, runs)?;
    let url = page.url();
    let serving = page.start()?;
    writeln!(std::io::stdout(), "{url}").context("cannot print the page's address")?;
    say(&format!("watching {what}; open the address above, Ctrl-C closes the page"));
    signals.forever().next();
    drop(serving);
    Ok(())
}
